{{/* Objects that every component has in the same form. */}}

{{/* (dict "root" $ "component" "trainer" "values" .Values.trainer) */}}
{{- define "millrace.serviceAccount" -}}
{{- if .values.serviceAccount.create -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "millrace.serviceAccountName" (list .root .component .values) }}
  labels:
    {{- include "millrace.labels" (list .root .component) | nindent 4 }}
  {{- with .values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}
{{- end -}}

{{/* The name service of a StatefulSet's pods; also of those that are not ready, because peers find them by name. */}}
{{- define "millrace.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "millrace.component" (list .root .component) }}
  labels:
    {{- include "millrace.labels" (list .root .component) | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "millrace.selectorLabels" (list .root .component) | nindent 4 }}
  ports:
    {{- range .ports }}
    - name: {{ .name }}
      port: {{ .port }}
      targetPort: {{ .name }}
      protocol: TCP
      appProtocol: {{ .protocol }}
    {{- end }}
{{- end -}}

{{- define "millrace.pdb" -}}
{{- if .values.pdb.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "millrace.component" (list .root .component) }}
  labels:
    {{- include "millrace.labels" (list .root .component) | nindent 4 }}
spec:
  maxUnavailable: {{ .values.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow # a broken pod must not hold up the drain of its node
  selector:
    matchLabels:
      {{- include "millrace.selectorLabels" (list .root .component) | nindent 6 }}
{{- end -}}
{{- end -}}

{{/* The pods of components as peers of a NetworkPolicy: (list $ "orchestrator" "env-server"). */}}
{{- define "millrace.peers" -}}
{{- $root := first . -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
      app.kubernetes.io/instance: {{ $root.Release.Name }}
    matchExpressions:
      - key: app.kubernetes.io/component
        operator: In
        values: {{ rest . | toJson }}
{{- end -}}

{{/* Object metadata of a NetworkPolicy and whom it is for: (list $ "trainer" "trainer-worker"). */}}
{{- define "millrace.policyHead" -}}
{{- $root := first . -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "millrace.component" (list $root (index . 1)) }}
  labels:
    {{- include "millrace.labels" (list $root (index . 1)) | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
      app.kubernetes.io/instance: {{ $root.Release.Name }}
    matchExpressions:
      - key: app.kubernetes.io/component
        operator: In
        values: {{ rest . | toJson }}
{{- end -}}
