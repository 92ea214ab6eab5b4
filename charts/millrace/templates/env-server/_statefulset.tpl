{{/*
A StatefulSet, because the spool (finished rollouts that are not committed yet) belongs to one env-server, which finds it
again after a restart, and because the pod's name is the address under which the orchestrator reaches it.
(dict "root" $ "component" "env-server" "name" "env-server" "values" .Values.envServer); a pool has "pool", its name.
*/}}
{{- define "millrace.envServer.statefulSet" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $service := include "millrace.component" (list $root .component) -}}
{{- $ofPool := dict -}}
{{- with .pool }}{{ $ofPool = dict "millrace.dev/pool" . }}{{ end -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "millrace.component" (list $root .name) }}
  labels:
    {{- include "millrace.labels" (list $root .component) | nindent 4 }}
    {{- with $ofPool }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if not $values.autoscaling.enabled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  serviceName: {{ $service }}
  podManagementPolicy: Parallel
  updateStrategy:
    type: RollingUpdate # one after the other; each drains, and its successor reads its spool
  selector:
    matchLabels:
      {{- include "millrace.selectorLabels" (list $root .component) | nindent 6 }}
      {{- with $ofPool }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  template:
    metadata:
      labels:
        {{- include "millrace.podLabels" (list $root .component $values) | nindent 8 }}
        {{- with $ofPool }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "millrace.podBase" (dict "root" $root "component" .component "account" "env-server" "values" $values "grace" (include "millrace.gracePeriod" (list $values 30))) | nindent 6 }}
      {{- if include "millrace.hasEnvironments" $values }}
      initContainers:
        {{- include "millrace.environments.initContainers" $root | nindent 8 }}
      {{- end }}
      containers:
        - name: env-server
          {{- include "millrace.containerBase" (dict "root" $root "values" $values) | nindent 10 }}
          env:
            {{- include "millrace.env.envServer" (dict "root" $root "component" .component "values" $values "announced" .pool) | nindent 12 }}
          ports:
            - name: grpc
              containerPort: 50052
            {{- include "millrace.healthPort" $root | nindent 12 }}
            {{- include "millrace.metricsPort" $root | nindent 12 }}
          {{- include "millrace.probes" (dict "root" $root "port" 50052 "service" "millrace.internal.v1.EnvService" "probes" $values.probes) | nindent 10 }}
          volumeMounts:
            {{- include "millrace.mounts" (dict "root" $root "values" $values) | nindent 12 }}
            {{- if include "millrace.hasEnvironments" $values }}
            - name: environments
              mountPath: /opt/environments
              readOnly: true
            {{- end }}
      volumes:
        {{- include "millrace.volumes" (dict "root" $root "values" $values "hasClaim" $values.spool.persistence.enabled) | nindent 8 }}
        {{- if include "millrace.hasEnvironments" $values }}
        {{- include "millrace.environments.volumes" $root | nindent 8 }}
        {{- end }}
  {{- if $values.spool.persistence.enabled }}
  persistentVolumeClaimRetentionPolicy:
    whenScaled: Retain # what was finished there is read when the replica comes back
    whenDeleted: Retain
  volumeClaimTemplates:
    {{- include "millrace.claim" (dict "name" "state" "claim" $values.spool.persistence) | nindent 4 }}
  {{- end }}
{{- end -}}
