{{/* A pod of `helm test`: the orchestrator's image as a client. (dict "root" $ "name" "doctor" "script" "...") */}}
{{- define "millrace.testPod" -}}
{{- $root := .root -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "millrace.component" (list $root (printf "test-%s" .name)) }}
  labels:
    {{- include "millrace.labels" (list $root "helm-test") | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-weight: {{ .weight | quote }}
    helm.sh/hook-delete-policy: before-hook-creation
spec:
  restartPolicy: Never
  activeDeadlineSeconds: {{ .deadline }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 10
  securityContext:
    {{- include "millrace.podSecurityContext" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: client
      {{- include "millrace.containerBase" (dict "root" $root "values" (dict "image" $root.Values.orchestrator.image "resources" $root.Values.helmTest.resources)) | nindent 6 }}
      command: [sh, -ec]
      args:
        - |
          {{- .script | nindent 10 }}
      workingDir: /tmp
      env:
        - name: HOME
          value: /tmp
        - name: MILLRACE_SERVER
          value: {{ include "millrace.orchestratorAddress" $root | quote }}
        {{- include "millrace.env.tls" $root | nindent 8 }}
        {{- if $root.Values.helmTest.tokenSecret }}
        - name: MILLRACE_TOKEN_FILE
          value: /etc/millrace/token/{{ $root.Values.helmTest.tokenSecretKey }}
        {{- end }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if $root.Values.tls.enabled }}
        - name: tls
          mountPath: /etc/millrace/tls
          readOnly: true
        {{- end }}
        {{- if $root.Values.helmTest.tokenSecret }}
        - name: token
          mountPath: /etc/millrace/token
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ include "millrace.tlsSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- with $root.Values.helmTest.tokenSecret }}
    - name: token
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
{{- end -}}
