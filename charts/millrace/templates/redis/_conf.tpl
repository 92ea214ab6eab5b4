{{- define "millrace.redisConf" -}}
bind * -::*
port 6379
dir /data
# Every second to disk: what a kill costs is read again from the object store (docs/reliability.md).
appendonly yes
appendfsync everysec
save ""
# Never throw away what is not committed yet; a full Redis is a visible wait.
maxmemory-policy noeviction
# The largest entry that a reader decodes.
proto-max-bulk-len 256mb
maxmemory {{ .Values.redis.bundled.maxMemory }}
{{- end -}}
