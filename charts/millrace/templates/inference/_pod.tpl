{{/* A pod that serves: a replica of its own, or the leader of a group. */}}
{{- define "millrace.inference.server" -}}
{{- $values := .Values.inference -}}
{{- $root := . -}}
{{- $service := ternary "millrace.internal.v1.PolicyService" "" (eq $values.readyWhen "policy") -}}
{{- include "millrace.podBase" (dict "root" $root "component" "inference" "values" $values "grace" (include "millrace.gracePeriod" (list $values 30))) }}
containers:
  - name: inference
    {{- include "millrace.containerBase" (dict "root" $root "values" $values) | nindent 4 }}
    env:
      {{- include "millrace.env.inference" . | nindent 6 }}
    ports:
      - name: grpc
        containerPort: 50053
      - name: http
        containerPort: 8000
      {{- include "millrace.healthPort" . | nindent 6 }}
    {{- include "millrace.probes" (dict "root" $root "port" 50053 "service" $service "probes" $values.probes) | nindent 4 }}
    volumeMounts:
      {{- include "millrace.mounts" (dict "root" $root "values" $values "hasTokens" true) | nindent 6 }}
volumes:
  {{- include "millrace.volumes" (dict "root" $root "values" $values "hasTokens" true) | nindent 2 }}
{{- end -}}
