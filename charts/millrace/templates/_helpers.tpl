{{/*
Names. Pods of a gang are called <fullname>-trainer-<6 hex>-worker-0-<n>-<5 letters>, and a name has at most 63 letters.
*/}}
{{- define "millrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains (default .Chart.Name .Values.nameOverride) .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride) | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The name of a component's objects: (list $ "env-server"). */}}
{{- define "millrace.component" -}}
{{- printf "%s-%s" (include "millrace.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{/* What selects the pods of a component; never anything else, because selectors are immutable: (list $ "env-server"). */}}
{{- define "millrace.selectorLabels" -}}
app.kubernetes.io/name: {{ default (index . 0).Chart.Name (index . 0).Values.nameOverride }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object: (list $ "env-server"). */}}
{{- define "millrace.labels" -}}
{{- $root := index . 0 -}}
{{ include "millrace.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: millrace
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of a pod template. No version: a new chart with the same image must not restart anything. */}}
{{- define "millrace.podLabels" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{ include "millrace.selectorLabels" (list $root (index . 1)) }}
app.kubernetes.io/part-of: millrace
{{- with merge (dict) ($values.podLabels | default dict) $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* registry/repository:tag or registry/repository@digest: (list $ .Values.trainer.image). */}}
{{- define "millrace.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := $image.registry | default $root.Values.image.registry -}}
{{- $name := ternary $image.repository (printf "%s/%s" $registry $image.repository) (empty $registry) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "millrace.serviceAccountName" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{- if $values.serviceAccount.create -}}
{{- $values.serviceAccount.name | default (include "millrace.component" (list $root (index . 1))) -}}
{{- else -}}
{{- $values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Where the orchestrator is, as every certificate and client names it. */}}
{{- define "millrace.orchestratorAddress" -}}
{{- printf "%s.%s.svc:50051" (include "millrace.component" (list . "orchestrator")) .Release.Namespace -}}
{{- end -}}

{{- define "millrace.redisSecret" -}}
{{- .Values.redis.existingSecret | default (include "millrace.component" (list . "redis")) -}}
{{- end -}}

{{- define "millrace.objectStoreSecret" -}}
{{- .Values.objectStore.existingSecret | default (ternary (include "millrace.component" (list . "object-store")) "" .Values.objectStore.bundled.enabled) -}}
{{- end -}}

{{- define "millrace.objectStoreEndpoint" -}}
{{- if .Values.objectStore.bundled.enabled -}}
{{- printf "http://%s.%s.svc:8333" (include "millrace.component" (list . "object-store")) .Release.Namespace -}}
{{- else -}}
{{- .Values.objectStore.endpoint -}}
{{- end -}}
{{- end -}}

{{/* s3://bucket/prefix?endpoint=...&region=..., never with credentials. */}}
{{- define "millrace.storeUrl" -}}
{{- $store := .Values.objectStore -}}
{{- $query := list -}}
{{- with include "millrace.objectStoreEndpoint" . }}{{- $query = append $query (printf "endpoint=%s" (urlquery .)) -}}{{- end -}}
{{- with $store.region }}{{- $query = append $query (printf "region=%s" (urlquery .)) -}}{{- end -}}
{{- $path := ternary "" (printf "/%s" (trimAll "/" $store.prefix)) (empty $store.prefix) -}}
{{- printf "s3://%s%s%s" $store.bucket $path (ternary "" (printf "?%s" (join "&" $query)) (empty $query)) -}}
{{- end -}}

{{- define "millrace.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "millrace.fullname" .)) -}}
{{- end -}}

{{/* The token that the services show each other. */}}
{{- define "millrace.workerTokenSecret" -}}
{{- .Values.auth.workers.existingSecret | default (printf "%s-worker-token" (include "millrace.fullname" .)) -}}
{{- end -}}

{{/* The gang of the trainer: ranks on each node. */}}
{{- define "millrace.trainerProcesses" -}}
{{- .Values.trainer.processesPerNode | default (max 1 (int .Values.trainer.gpu.count)) -}}
{{- end -}}

{{/* What the process needs to end in order, and a margin for what it does besides: (list values margin). */}}
{{- define "millrace.gracePeriod" -}}
{{- $values := index . 0 -}}
{{- add $values.drainSeconds $values.graceSeconds (index . 1) -}}
{{- end -}}
