{{/* Where orchestrator, env-server and trainer serve GET /metrics; inference has it at its HTTP API. */}}
{{- define "millrace.env.metrics" -}}
{{- if .Values.monitoring.metrics.enabled }}
- name: MILLRACE_METRICS_LISTEN
  value: "0.0.0.0:9090"
{{- end }}
{{- end -}}

{{- define "millrace.metricsPort" -}}
{{- if .Values.monitoring.metrics.enabled }}
- name: metrics
  containerPort: 9090
{{- end }}
{{- end -}}

{{/* The token that opens the metrics and nothing else, for every service: a file, a mount and a volume of its own. */}}
{{- define "millrace.env.metricsToken" -}}
{{- if .Values.monitoring.serviceMonitor.tokenSecret }}
- name: MILLRACE_METRICS_TOKEN_FILE
  value: /etc/millrace/metrics-token/{{ .Values.monitoring.serviceMonitor.tokenSecretKey }}
{{- end }}
{{- end -}}

{{- define "millrace.metricsToken.mount" -}}
{{- if .Values.monitoring.serviceMonitor.tokenSecret }}
- name: metrics-token
  mountPath: /etc/millrace/metrics-token
  readOnly: true
{{- end }}
{{- end -}}

{{- define "millrace.metricsToken.volume" -}}
{{- with .Values.monitoring.serviceMonitor.tokenSecret }}
- name: metrics-token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Who may reach the metrics: nobody but networkPolicy.metricsClients. */}}
{{- define "millrace.metricsIngress" -}}
{{- if and .Values.monitoring.metrics.enabled .Values.networkPolicy.metricsClients }}
- from:
    {{- toYaml .Values.networkPolicy.metricsClients | nindent 4 }}
  ports:
    - port: 9090
      protocol: TCP
{{- end }}
{{- end -}}

{{/* The components that serve GET /metrics for Prometheus alone, separated by spaces. */}}
{{- define "millrace.metricsComponents" -}}
orchestrator env-server trainer{{ if .Values.envServer.pools }} env-server-pool{{ end }}
{{- end -}}

{{/* Services whose pods are scraped, as a regular expression for the label `service` that the Prometheus operator adds. */}}
{{- define "millrace.scraped" -}}
{{- printf "%s-(orchestrator-metrics|env-server-metrics|env-server-pool-metrics|trainer-metrics|inference-http)" (include "millrace.fullname" .) -}}
{{- end -}}
