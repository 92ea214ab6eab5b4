{{/* Environments beside those of the image: init containers put them into an emptyDir that PYTHONPATH names. */}}
{{- define "millrace.hasEnvironments" -}}
{{- if or .environments.packages .environments.images }}true{{ end -}}
{{- end -}}

{{- define "millrace.environments.initContainers" -}}
{{- $values := .Values.envServer -}}
{{- $root := . -}}
{{- range $index, $item := $values.environments.images }}
- name: environments-{{ $index }}
  {{- include "millrace.containerBase" (dict "root" $root "values" (dict "image" $item "resources" $values.environments.resources)) | nindent 2 }}
  command: [sh, -c]
  args:
    - mkdir -p /opt/environments/python && cp -R "$1"/. /opt/environments/python/
    - sh
    - {{ $item.path | quote }}
  volumeMounts:
    - name: environments
      mountPath: /opt/environments
{{- end }}
{{- if $values.environments.packages }}
- name: environments-pip
  {{- include "millrace.containerBase" (dict "root" $root "values" (dict "image" $values.image "resources" $values.environments.resources)) | nindent 2 }}
  command: [python, -c]
  args:
    - |
      {{- $root.Files.Get "files/install_environments.py" | nindent 6 }}
    - /opt/environments
    {{- range $values.environments.packages }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    - name: PIP_NO_CACHE_DIR
      value: "1"
    - name: PIP_DISABLE_PIP_VERSION_CHECK
      value: "1"
    {{- if $values.environments.pipConfig.existingSecret }}
    - name: PIP_CONFIG_FILE
      value: /etc/millrace/pip/{{ $values.environments.pipConfig.key }}
    {{- end }}
  volumeMounts:
    - name: environments
      mountPath: /opt/environments
    - name: tmp
      mountPath: /tmp
    {{- if $values.environments.pipConfig.existingSecret }}
    - name: pip
      mountPath: /etc/millrace/pip
      readOnly: true
    {{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.environments.volumes" -}}
- name: environments
  emptyDir: {}
{{- with .Values.envServer.environments.pipConfig.existingSecret }}
- name: pip
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}
