{{/* Whether the trainer is a gang over several nodes, and of which kind: "", "statefulset" or "jobset". */}}
{{- define "millrace.trainer.gang" -}}
{{- if gt (int .Values.trainer.nodes) 1 }}{{ .Values.trainer.gang }}{{ end -}}
{{- end -}}

{{/*
The command of one node: (dict "root" $ "leader" "name of the leader's host" "host" "name of this host" "isLeader" true).
Ranks follow the order of the hosts' names, and the leader's comes first in it: rank 0, which alone has a health server, is
there. Over one node and one process the image's own entry point serves.
*/}}
{{- define "millrace.trainer.command" -}}
{{- $values := .root.Values.trainer -}}
{{- $processes := int (include "millrace.trainerProcesses" .root) -}}
{{- if or (gt (int $values.nodes) 1) (gt $processes 1) -}}
command: [tini, --, torchrun]
args:
  {{- if gt (int $values.nodes) 1 }}
  - --nnodes={{ $values.nodes }}
  - --rdzv-backend=c10d
  - --rdzv-id={{ include "millrace.fullname" .root }}
  - --rdzv-endpoint={{ .leader }}:29400
  - --rdzv-conf=is_host={{ ternary "true" "false" .isLeader }},join_timeout={{ $values.joinSeconds }},read_timeout=60
  - --local-addr={{ .host }}
  {{- else }}
  - --standalone
  {{- end }}
  - --nproc-per-node={{ $processes }}
  - --max-restarts={{ ternary 0 (int $values.maxRestarts) (eq (include "millrace.trainer.gang" .root) "jobset") }}
  - --shutdown-timeout={{ $values.graceSeconds }} # torchrun kills its ranks after 30 s otherwise
  - --no-python
  - millrace-trainer
{{- end -}}
{{- end -}}

{{/* The spec of a trainer's pod: the arguments of the command, "component", and "hasProbes". */}}
{{- define "millrace.trainer.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values.trainer -}}
{{- include "millrace.podBase" (dict "root" $root "component" .component "account" "trainer" "values" $values "grace" (include "millrace.gracePeriod" (list $values 45))) }}
{{- with .restartPolicy }}
restartPolicy: {{ . }}
{{- end }}
{{- if $values.exampleModel.enabled }}
initContainers:
  - name: example-model # the untrained model of examples/reverse_text, for `helm test` and first steps
    {{- include "millrace.containerBase" (dict "root" $root "values" (dict "image" $values.image "resources" $values.exampleModel.resources)) | nindent 4 }}
    command: [python, /workspace/examples/reverse_text/make_model.py]
    args: [--output, /var/lib/millrace/example]
    env:
      - name: HOME
        value: /tmp
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      - name: state
        mountPath: /var/lib/millrace
{{- end }}
containers:
  - name: trainer
    {{- include "millrace.containerBase" (dict "root" $root "values" $values) | nindent 4 }}
    {{- include "millrace.trainer.command" . | nindent 4 }}
    env:
      {{- if and (include "millrace.trainer.gang" $root) (not .isLeader) }}
      {{- if .index }}
      - name: POD_INDEX
        valueFrom:
          fieldRef:
            fieldPath: {{ .index }}
      {{- else }}
      {{- include "millrace.env.podName" $root | nindent 6 }}
      {{- end }}
      {{- end }}
      {{- include "millrace.env.trainer" $root | nindent 6 }}
    ports:
      - name: grpc
        containerPort: 50054
      {{- include "millrace.healthPort" $root | nindent 6 }}
      {{- include "millrace.metricsPort" $root | nindent 6 }}
      {{- if gt (int $values.nodes) 1 }}
      - name: rendezvous
        containerPort: 29400
      {{- end }}
    {{- if .hasProbes }}
    {{- include "millrace.probes" (dict "root" $root "port" 50054 "service" "" "probes" $values.probes) | nindent 4 }}
    {{- end }}
    volumeMounts:
      {{- include "millrace.mounts" (dict "root" $root "values" $values) | nindent 6 }}
volumes:
  {{- include "millrace.volumes" (dict "root" $root "values" $values "hasClaim" (and $values.persistence.enabled (ne (include "millrace.trainer.gang" $root) "jobset"))) | nindent 2 }}
{{- end -}}
