{{/*
Environment variables. Every MILLRACE_ name here is one that the service reads (tests/chart/test_environment.py checks it
against the code); the others are for the libraries below it, or are used by a later $(NAME).
*/}}

{{- define "millrace.env.podName" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end -}}

{{/* What every Millrace process gets: (list $ values). */}}
{{- define "millrace.env.common" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
- name: HOME # caches of libraries; the root file system is read-only
  value: /var/lib/millrace
- name: MILLRACE_PREFIX
  value: {{ $root.Values.prefix | quote }}
- name: MILLRACE_LOG_LEVEL
  value: {{ $values.logLevel | default $root.Values.logLevel | quote }}
- name: MILLRACE_LOG_JSON
  value: "1"
- name: MILLRACE_DRAIN_S
  value: {{ $values.drainSeconds | quote }}
- name: MILLRACE_GRACE_S
  value: {{ $values.graceSeconds | quote }}
- name: MILLRACE_WORKER_TOKEN_FILE
  value: /etc/millrace/worker-token/{{ $root.Values.auth.workers.existingSecretKey }}
{{ include "millrace.env.tls" $root }}
{{- include "millrace.env.metricsToken" $root }}
{{- if $root.Values.tls.enabled }}
- name: MILLRACE_HEALTH_LISTEN # Kubernetes' probes speak no TLS; this port tells the health and nothing else
  value: "0.0.0.0:50055"
{{- if $root.Values.tls.requireClientCertificates }}
- name: MILLRACE_TLS_CLIENT_CA
  value: /etc/millrace/tls/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.env.tls" -}}
{{- if .Values.tls.enabled -}}
- name: MILLRACE_TLS_CERT
  value: /etc/millrace/tls/tls.crt
- name: MILLRACE_TLS_KEY
  value: /etc/millrace/tls/tls.key
- name: MILLRACE_TLS_CA
  value: /etc/millrace/tls/ca.crt
{{- else -}}
- name: MILLRACE_INSECURE # tls.enabled is false: plain text inside the cluster, on purpose
  value: "1"
{{- end -}}
{{- end -}}

{{/* The hashes of the tokens that people show: to the API, and to the engines' HTTP API. */}}
{{- define "millrace.env.tokens" -}}
{{- if .Values.auth.existingSecret }}
- name: MILLRACE_TOKENS_FILE
  value: /etc/millrace/tokens/{{ .Values.auth.existingSecretKeys.tokens }}
{{- end }}
{{- end -}}

{{- define "millrace.env.orchestratorAddress" -}}
- name: MILLRACE_ORCHESTRATOR
  value: {{ include "millrace.orchestratorAddress" . | quote }}
{{- end -}}

{{/* The URL is one secret, because it may hold a password. */}}
{{- define "millrace.env.redis" -}}
- name: MILLRACE_REDIS_URL
{{- if or .Values.redis.bundled.enabled .Values.redis.existingSecret }}
  valueFrom:
    secretKeyRef:
      name: {{ include "millrace.redisSecret" . }}
      key: {{ .Values.redis.existingSecretKeys.url }}
{{- else }}
  value: {{ .Values.redis.url | quote }}
{{- end }}
{{- end -}}

{{/* Without a secret the credentials come from the pod's identity (serviceAccount.annotations). */}}
{{- define "millrace.env.store" -}}
- name: MILLRACE_STORE_URL
  value: {{ include "millrace.storeUrl" . | quote }}
{{- with include "millrace.objectStoreSecret" . }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.objectStore.existingSecretKeys.accessKey }}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.objectStore.existingSecretKeys.secretKey }}
{{- end }}
{{- end -}}

{{/* (list $ "trainer"): only the components that are named get the token. */}}
{{- define "millrace.env.huggingFace" -}}
{{- $hub := (index . 0).Values.huggingFace -}}
{{- if and $hub.existingSecret (has (index . 1) $hub.components) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $hub.existingSecret }}
      key: {{ $hub.existingSecretKeys.token }}
{{- end }}
{{- end -}}

{{/* Where the traces of every run go. The headers are one secret, because a token is in them. */}}
{{- define "millrace.env.traces" -}}
{{- with .Values.monitoring.traces }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_TRACES_SAMPLER
  value: traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .share | quote }}
{{- if .existingSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .existingSecretKeys.headers }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.env.orchestrator" -}}
{{- $root := . -}}
{{ include "millrace.env.common" (list $root .Values.orchestrator) }}
- name: MILLRACE_LISTEN
  value: "0.0.0.0:50051"
{{- if .Values.orchestrator.dashboard.enabled }}
- name: MILLRACE_DASHBOARD_LISTEN
  value: "0.0.0.0:8080"
{{- end }}
{{- include "millrace.env.metrics" . }}
{{ include "millrace.env.redis" . }}
{{ include "millrace.env.store" . }}
{{- include "millrace.env.tokens" . }}
{{- with .Values.wandb.existingSecret }}
- name: WANDB_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $root.Values.wandb.existingSecretKeys.apiKey }}
{{- end }}
{{- include "millrace.env.traces" . }}
{{- include "millrace.env.huggingFace" (list . "orchestrator") }}
{{- with .Values.orchestrator.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "env-server" "values" .Values.envServer); a pool says its image: "announced" true. */}}
{{- define "millrace.env.envServer" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{ include "millrace.env.podName" $root }}
{{ include "millrace.env.common" (list $root $values) }}
- name: MILLRACE_LISTEN
  value: "0.0.0.0:50052"
{{- include "millrace.env.metrics" $root }}
- name: MILLRACE_ADVERTISE
  value: "$(POD_NAME).{{ include "millrace.component" (list $root .component) }}.{{ $root.Release.Namespace }}.svc:50052"
{{ include "millrace.env.orchestratorAddress" $root }}
{{ include "millrace.env.redis" $root }}
{{ include "millrace.env.store" $root }}
{{- if .announced }}
- name: MILLRACE_ENV_IMAGE # runs name it as orchestrator.env.image
  value: {{ include "millrace.image" (list $root $values.image) | quote }}
{{- end }}
{{- with $values.pythons }}
- name: MILLRACE_ENV_PYTHONS
  value: {{ join ":" . | quote }}
{{- end }}
- name: MILLRACE_ENV_WORKERS
  value: {{ $values.workers | quote }}
- name: MILLRACE_ENV_CAPACITY
  value: {{ $values.capacity | quote }}
- name: MILLRACE_ENV_ISOLATION
  value: {{ $values.isolation | quote }}
- name: MILLRACE_SPOOL_DIR
  value: /var/lib/millrace/spool
- name: MILLRACE_SPOOL_BYTES
  value: {{ $values.spool.maxBytes | int64 | quote }}
{{- if include "millrace.hasEnvironments" $values }}
- name: PYTHONPATH
  value: /opt/environments/python
{{- end }}
{{- include "millrace.env.huggingFace" (list $root "env-server") }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.env.inference" -}}
{{- $values := .Values.inference -}}
{{ include "millrace.env.podName" . }}
{{ include "millrace.env.common" (list . $values) }}
- name: MILLRACE_LISTEN
  value: "0.0.0.0:50053"
- name: MILLRACE_HTTP_LISTEN
  value: "0.0.0.0:8000"
- name: MILLRACE_ADVERTISE
  value: "$(POD_NAME).{{ include "millrace.component" (list . "inference") }}.{{ .Release.Namespace }}.svc:50053"
{{ include "millrace.env.orchestratorAddress" . }}
{{ include "millrace.env.store" . }}
{{- include "millrace.env.tokens" . }}
- name: MILLRACE_ENGINE
  value: {{ $values.engine | quote }}
- name: OMP_NUM_THREADS
  value: {{ $values.threads | quote }}
{{- with $values.model }}
- name: MILLRACE_MODEL
  value: {{ . | quote }}
{{- end }}
{{- if eq $values.engine "vllm" }}
{{- $flags := deepCopy $values.vllmFlags }}
{{- if gt (int $values.nodes) 1 }}
{{- /* LWS puts its variables before those of the template, so that they can be used here; the leader has index 0 */}}
{{- $flags = merge (dict "nnodes" (int $values.nodes) "node_rank" "$(LWS_WORKER_INDEX)" "master_addr" "$(LWS_LEADER_ADDRESS)" "master_port" 29500 "distributed_executor_backend" "mp") $flags }}
{{- end }}
{{- if and (gt (int $values.gpu.count) 1) (not (hasKey $flags "tensor_parallel_size")) (eq (int $values.nodes) 1) }}
{{- $flags = merge (dict "tensor_parallel_size" (int $values.gpu.count)) $flags }}
{{- end }}
- name: MILLRACE_VLLM_FLAGS
  value: {{ toJson $flags | quote }}
- name: MILLRACE_VLLM_START_S
  value: {{ $values.probes.startupSeconds | quote }}
{{- end }}
{{- with $values.maxNumSeqs }}
- name: MILLRACE_MAX_NUM_SEQS
  value: {{ . | quote }}
{{- end }}
{{- with $values.maxModelLen }}
- name: MILLRACE_MAX_MODEL_LEN
  value: {{ . | quote }}
{{- end }}
{{- with $values.kvCacheBytes }}
- name: MILLRACE_KV_CACHE_BYTES
  value: {{ . | int64 | quote }}
{{- end }}
{{- include "millrace.env.huggingFace" (list . "inference") }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.env.trainer" -}}
{{- $values := .Values.trainer -}}
{{ include "millrace.env.common" (list . $values) }}
- name: MILLRACE_LISTEN
  value: "0.0.0.0:50054"
{{- include "millrace.env.metrics" . }}
{{ include "millrace.env.orchestratorAddress" . }}
{{ include "millrace.env.redis" . }}
{{ include "millrace.env.store" . }}
- name: OMP_NUM_THREADS
  value: {{ $values.threads | quote }}
{{- if gt (int $values.gpu.count) 0 }}
- name: MILLRACE_TRAINER_DEVICE # a GPU that cannot be used ends the start: nothing trains on the CPU instead
  value: cuda
{{- end }}
{{- if gt (int $values.nodes) 1 }}
- name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE # else a restarted gang finds the addresses of dead ranks
  value: "1"
{{- end }}
{{- include "millrace.env.huggingFace" (list . "trainer") }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}
