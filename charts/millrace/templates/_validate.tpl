{{/* What the schema cannot say: values that contradict each other. */}}
{{- define "millrace.validate" -}}
{{- $wrong := list -}}
{{- if and (not .Values.redis.bundled.enabled) (empty .Values.redis.url) (empty .Values.redis.existingSecret) -}}
{{- $wrong = append $wrong "redis.bundled.enabled is false, so redis.existingSecret (with the whole URL) or redis.url has to be set" -}}
{{- end -}}
{{- if and .Values.redis.bundled.enabled .Values.redis.url -}}
{{- $wrong = append $wrong "redis.url is set, and so is redis.bundled.enabled; choose one" -}}
{{- end -}}
{{- if and .Values.objectStore.bundled.enabled .Values.objectStore.endpoint -}}
{{- $wrong = append $wrong "objectStore.endpoint is set, and so is objectStore.bundled.enabled; choose one" -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.certManager.enabled) (empty .Values.tls.existingSecret) -}}
{{- $wrong = append $wrong "tls.enabled needs tls.existingSecret, or tls.certManager.enabled with an issuerRef" -}}
{{- end -}}
{{- if and .Values.tls.enabled (empty .Values.auth.existingSecret) (not .Values.tls.requireClientCertificates) -}}
{{- $wrong = append $wrong "tls.enabled needs auth.existingSecret (tokens of the public API) or tls.requireClientCertificates: else everybody could call it, and the orchestrator would refuse to start" -}}
{{- end -}}
{{- if and .Values.tls.requireClientCertificates (or .Values.orchestrator.ingress.enabled .Values.orchestrator.grpcRoute.enabled) -}}
{{- $wrong = append $wrong "tls.requireClientCertificates shuts out an Ingress or GRPCRoute, which shows no certificate of this CA" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (not .Values.tls.enabled) (not .Values.auth.allowPlainText) -}}
{{- $wrong = append $wrong "auth.existingSecret without tls.enabled sends tokens in plain text; enable TLS, or set auth.allowPlainText if a mesh encrypts" -}}
{{- end -}}
{{- if and (gt (int .Values.inference.nodes) 1) (ne .Values.inference.engine "vllm") -}}
{{- $wrong = append $wrong "inference.nodes above 1 needs inference.engine vllm" -}}
{{- end -}}
{{- if and (gt (int .Values.inference.nodes) 1) (empty .Values.inference.model) -}}
{{- $wrong = append $wrong "inference.nodes above 1 needs inference.model: the other nodes have to know it from the start" -}}
{{- end -}}
{{- if and (gt (int .Values.trainer.nodes) 1) (ne (int .Values.trainer.replicas) 1) -}}
{{- $wrong = append $wrong "trainer.nodes above 1 is one gang: trainer.replicas has to be 1; install another release for another gang" -}}
{{- end -}}
{{- if and (eq (include "millrace.trainer.gang" .) "jobset") .Values.trainer.persistence.enabled -}}
{{- $wrong = append $wrong "trainer.persistence needs trainer.gang statefulset: a JobSet's pods have no claims of their own" -}}
{{- end -}}
{{- if and .Values.inference.autoscaling.enabled (eq .Values.inference.autoscaling.kind "keda") (empty .Values.inference.autoscaling.prometheusUrl) -}}
{{- $wrong = append $wrong "inference.autoscaling.kind keda needs inference.autoscaling.prometheusUrl" -}}
{{- end -}}
{{- $byRollouts := and .Values.envServer.autoscaling.enabled (ne .Values.envServer.autoscaling.kind "cpu") -}}
{{- if and $byRollouts (not .Values.monitoring.metrics.enabled) -}}
{{- $wrong = append $wrong "envServer.autoscaling.kind keda and hpa follow the env-servers' metrics: monitoring.metrics.enabled has to be true" -}}
{{- end -}}
{{- if and $byRollouts (eq .Values.envServer.autoscaling.kind "keda") (empty .Values.envServer.autoscaling.prometheusUrl) -}}
{{- $wrong = append $wrong "envServer.autoscaling.kind keda needs envServer.autoscaling.prometheusUrl" -}}
{{- end -}}
{{- if and .Values.monitoring.prometheusRule.enabled (not .Values.monitoring.metrics.enabled) -}}
{{- $wrong = append $wrong "monitoring.prometheusRule looks at the metrics of all components: monitoring.metrics.enabled has to be true" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.networkPolicy.enabled (empty .Values.networkPolicy.metricsClients) -}}
{{- $wrong = append $wrong "monitoring.serviceMonitor.enabled needs networkPolicy.metricsClients: the policies let nobody else scrape, and every pod would count as down; name Prometheus' namespace or pods, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- range $name, $scaling := dict "inference" .Values.inference.autoscaling "envServer" .Values.envServer.autoscaling -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- $wrong = append $wrong (printf "%s.autoscaling.minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.orchestrator.grpcRoute.enabled (empty .Values.orchestrator.grpcRoute.parentRefs) -}}
{{- $wrong = append $wrong "orchestrator.grpcRoute.enabled needs parentRefs: the gateway to attach to" -}}
{{- end -}}
{{- if and .Values.orchestrator.ingress.enabled (empty .Values.orchestrator.ingress.host) -}}
{{- $wrong = append $wrong "orchestrator.ingress.enabled needs a host" -}}
{{- end -}}
{{- if and .Values.helmTest.run.enabled (not .Values.trainer.exampleModel.enabled) (empty .Values.helmTest.run.model) -}}
{{- $wrong = append $wrong "helmTest.run needs trainer.exampleModel.enabled or helmTest.run.model: the two steps train some model" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (empty .Values.helmTest.tokenSecret) .Values.helmTest.enabled -}}
{{- $wrong = append $wrong "auth.existingSecret is set, so `helm test` needs helmTest.tokenSecret (a token in plain), or helmTest.enabled false" -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n\nthese values contradict each other:\n  - %s\n" (join "\n  - " $wrong)) -}}
{{- end -}}
{{- end -}}
