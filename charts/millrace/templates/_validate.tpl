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
{{- $pools := list -}}
{{- range .Values.envServer.pools -}}
{{- if has .name $pools -}}
{{- $wrong = append $wrong (printf "envServer.pools has two that are called %s" .name) -}}
{{- end -}}
{{- $pools = append $pools .name -}}
{{- if or (empty .image.repository) (and (empty .image.tag) (empty .image.digest)) -}}
{{- $wrong = append $wrong (printf "envServer.pools: %s needs image.repository and image.tag or image.digest: the tag of the Millrace images is not its own" .name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.orchestrator.grpcRoute.enabled (empty .Values.orchestrator.grpcRoute.parentRefs) -}}
{{- $wrong = append $wrong "orchestrator.grpcRoute.enabled needs parentRefs: the gateway to attach to" -}}
{{- end -}}
{{- if and .Values.orchestrator.ingress.enabled (empty .Values.orchestrator.ingress.host) -}}
{{- $wrong = append $wrong "orchestrator.ingress.enabled needs a host" -}}
{{- end -}}
{{- with .Values.orchestrator.dashboard }}
{{- if and .ingress.enabled (not .enabled) -}}
{{- $wrong = append $wrong "orchestrator.dashboard.ingress.enabled needs orchestrator.dashboard.enabled" -}}
{{- end -}}
{{- if and .ingress.enabled (empty .ingress.host) -}}
{{- $wrong = append $wrong "orchestrator.dashboard.ingress.enabled needs a host" -}}
{{- end -}}
{{- if and .ingress.enabled (empty $.Values.auth.existingSecret) -}}
{{- $wrong = append $wrong "orchestrator.dashboard.ingress.enabled needs auth.existingSecret: without tokens the dashboard answers to addresses and localhost, and to no host name" -}}
{{- end -}}
{{- if and .enabled (ne .service.type "ClusterIP") (empty $.Values.auth.existingSecret) (not $.Values.tls.requireClientCertificates) -}}
{{- $wrong = append $wrong (printf "orchestrator.dashboard.service.type %s shows every run's samples to whoever reaches its address: it needs auth.existingSecret (tokens) or tls.requireClientCertificates; or keep ClusterIP and use `kubectl port-forward`" .service.type) -}}
{{- end -}}
{{- if and .ingress.enabled $.Values.tls.requireClientCertificates -}}
{{- $wrong = append $wrong "tls.requireClientCertificates shuts out orchestrator.dashboard.ingress, which shows no certificate of this CA" -}}
{{- end -}}
{{- if and .ingress.enabled $.Values.networkPolicy.enabled (empty $.Values.networkPolicy.dashboardClients) -}}
{{- $wrong = append $wrong "orchestrator.dashboard.ingress.enabled needs networkPolicy.dashboardClients: the policies let nobody else in; name the ingress controller's namespace or pods, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: ingress-nginx}}}]" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.traces.existingSecret (empty .Values.monitoring.traces.endpoint) -}}
{{- $wrong = append $wrong "monitoring.traces.existingSecret needs monitoring.traces.endpoint: headers of which collector?" -}}
{{- end -}}
{{- if and .Values.helmTest.run.enabled (not .Values.trainer.exampleModel.enabled) (empty .Values.helmTest.run.model) -}}
{{- $wrong = append $wrong "helmTest.run needs trainer.exampleModel.enabled or helmTest.run.model: the two steps train some model" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (empty .Values.helmTest.tokenSecret) .Values.helmTest.enabled -}}
{{- $wrong = append $wrong "auth.existingSecret is set, so `helm test` needs helmTest.tokenSecret (a token in plain), or helmTest.enabled false" -}}
{{- end -}}
{{- range $name, $part := dict "inference" .Values.inference "trainer" .Values.trainer -}}
{{- $tag := $part.image.tag | default $.Values.image.tag -}}
{{- if and (gt (int $part.gpu.count) 0) (not (contains "cuda" $tag)) (empty $part.image.digest) -}}
{{- $wrong = append $wrong (printf "%s.gpu.count is %d, and the image's tag %q has no CUDA: set %s.image.tag to one that ends in -cuda" $name (int $part.gpu.count) $tag $name) -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n\nthese values contradict each other:\n  - %s\n" (join "\n  - " $wrong)) -}}
{{- end -}}
{{- end -}}
