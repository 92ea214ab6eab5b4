{{/*
Pods. The security context is not a value: nothing here needs more, and a chart that can be weakened by accident will be.
*/}}
{{- define "millrace.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.security.runAsUser }}
runAsUser: {{ int . }}
runAsGroup: {{ int . }}
fsGroup: {{ int . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "millrace.containerSecurityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* requests and limits, with the GPUs in both: (list resources gpu). */}}
{{- define "millrace.resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- $gpu := index . 1 -}}
{{- if gt (int (dig "count" 0 $gpu)) 0 -}}
{{- $devices := dict $gpu.resource (int $gpu.count) -}}
{{- $resources = dict "requests" (merge $devices (dig "requests" dict $resources)) "limits" (merge (deepCopy $devices) (dig "limits" dict $resources)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* What of a pod is not its containers: (dict "root" $ "component" "trainer" "values" .Values.trainer "grace" 60). */}}
{{- define "millrace.podBase" -}}
{{- $root := .root -}}
{{- $values := .values -}}
serviceAccountName: {{ include "millrace.serviceAccountName" (list $root (.account | default .component) $values) }}
automountServiceAccountToken: false
enableServiceLinks: false # else every Service becomes MILLRACE_... variables
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- include "millrace.podSecurityContext" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What every Millrace container has: (dict "root" $ "values" .Values.trainer). */}}
{{- define "millrace.containerBase" -}}
image: {{ include "millrace.image" (list .root .values.image) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "millrace.containerSecurityContext" .root | nindent 2 }}
resources:
  {{- include "millrace.resources" (list .values.resources (.values.gpu | default dict)) | nindent 2 }}
{{- end -}}

{{- define "millrace.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: state
  mountPath: /var/lib/millrace
- name: worker-token # secrets are folders, not subPaths: only so a changed one reaches the running process
  mountPath: /etc/millrace/worker-token
  readOnly: true
{{- include "millrace.metricsToken.mount" .root }}
{{- if and .hasTokens .root.Values.auth.existingSecret }}
- name: tokens
  mountPath: /etc/millrace/tokens
  readOnly: true
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/millrace/tls
  readOnly: true
{{- end }}
{{- if .values.shmSize }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* `state` is an emptyDir, or a claim of the pod's own (volumeClaimTemplates) where the component keeps something. */}}
{{- define "millrace.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if not .hasClaim }}
- name: state
  emptyDir:
    {{- if .values.stateSize }}
    sizeLimit: {{ .values.stateSize }}
    {{- else }} {}
    {{- end }}
{{- end }}
- name: worker-token
  secret:
    secretName: {{ include "millrace.workerTokenSecret" .root }}
    defaultMode: 0440
{{- include "millrace.metricsToken.volume" .root }}
{{- if and .hasTokens .root.Values.auth.existingSecret }}
- name: tokens
  secret:
    secretName: {{ .root.Values.auth.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "millrace.tlsSecret" .root }}
    defaultMode: 0440
{{- end }}
{{- if .values.shmSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .values.shmSize }}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A claim of each pod, ReadWriteOnce: (dict "name" "state" "claim" .Values.redis.bundled.persistence). */}}
{{- define "millrace.claim" -}}
- metadata:
    name: {{ .name }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .claim.storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .claim.size }}
{{- end -}}

{{/*
Health by Kubernetes' own gRPC probe. It speaks no TLS: with TLS it asks the port that tells nothing but the health.
(dict "root" $ "port" 50051 "service" "millrace.v1.RunService" "probes" .Values.orchestrator.probes)
*/}}
{{- define "millrace.probes" -}}
{{- $port := ternary 50055 .port .root.Values.tls.enabled -}}
startupProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int .probes.startupSeconds) 5) }}
livenessProbe:
  grpc: {port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int .probes.livenessSeconds) 10) }}
readinessProbe:
  grpc:
    port: {{ $port }}
    {{- with .service }}
    service: {{ . }}
    {{- end }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* The port of those probes. */}}
{{- define "millrace.healthPort" -}}
{{- if .Values.tls.enabled }}
- name: health
  containerPort: 50055
{{- end }}
{{- end -}}
