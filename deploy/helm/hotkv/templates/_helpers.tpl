{{/* Names, labels, and hotkv's settings: what the values say and what the chart adds. */}}

{{- define "hotkv.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "hotkv.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "hotkv.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "hotkv.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "hotkv.selector" -}}
app.kubernetes.io/name: {{ include "hotkv.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "hotkv.labels" -}}
{{ include "hotkv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Not tag and digest: some runtimes refuse a name with both. */}}
{{- define "hotkv.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end -}}

{{/* What the server's pod and the one of `helm test` need to be admitted and to start. */}}
{{- define "hotkv.admitted" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.serviceAccount.create }}
serviceAccountName: {{ .Values.serviceAccount.name | default (include "hotkv.fullname" .) | quote }}
{{- else if .Values.serviceAccount.name }}
serviceAccountName: {{ .Values.serviceAccount.name | quote }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with concat .Values.tolerations (ternary .Values.gpu.tolerations list .Values.gpu.enabled) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end -}}

{{/* Where engines can't reach it: the sockets' directory is theirs, too. */}}
{{- define "hotkv.adminSocket" -}}/run/hotkv-admin/admin.sock{{- end -}}

{{/* All settings as JSON, with those that the chart adds. */}}
{{- define "hotkv.settings" -}}
{{- $directories := .Values.directories -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $own := dict
      "runtime_dir" $directories.sockets
      "arena" (dict "dir" $directories.arena)
      "security" (dict "admin_socket" (include "hotkv.adminSocket" .)) -}}
{{- if $directories.disk -}}
{{- $_ := set $own "tiers" (dict "disk" (dict "path" $directories.disk)) -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings $own -}}
{{- range $name, $from := .Values.secrets.files -}}
{{- $named := printf "/etc/hotkv-secrets/%s" $name -}}
{{- range $part := splitList "." $name | reverse -}}
{{- $named = dict $part $named -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings $named -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* A value of TOML on one line. Not toToml: whole numbers become 9433.0 there. */}}
{{- define "hotkv.toml.value" -}}
{{- if kindIs "map" . -}}
{ {{- range $at, $key := keys . | sortAlpha }}{{ if $at }},{{ end }} {{ $key }} = {{ include "hotkv.toml.value" (get $ $key) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $at, $item := . }}{{ if $at }}, {{ end }}{{ include "hotkv.toml.value" $item }}{{ end }}]
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* A table of TOML with those below it. Of a list: its dotted name, empty for the top; the table. TOML has no null: such a value is left
out, so the server has its default. */}}
{{- define "hotkv.toml.table" -}}
{{- $name := first . -}}
{{- $table := last . -}}
{{- range $key, $value := $table -}}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "hotkv.toml.value" $value }}
{{- end -}}
{{- end -}}
{{- range $key, $value := $table -}}
{{- if kindIs "map" $value -}}
{{- $dotted := list $name $key | compact | join "." }}

[{{ $dotted }}]
{{- include "hotkv.toml.table" (list $dotted $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether HTTP listens inside the pod only. Of the settings. */}}
{{- define "hotkv.local" -}}
{{- has (dig "http" "host" "127.0.0.1" .) (list "127.0.0.1" "localhost" "::1") -}}
{{- end -}}

{{/* An endpoint of events that the server binds, as hotkv_server.events.publisher.binds; empty for another, to which it connects. */}}
{{- define "hotkv.bound" -}}
{{- with . }}{{ if or (contains "*" .) (contains "::" .) (contains "//0.0.0.0:" .) }}{{ . }}{{ end }}{{ end -}}
{{- end -}}

{{/* Ports that the settings open, as a list in JSON; one that the server chooses (0) is not known here. */}}
{{- define "hotkv.ports" -}}
{{- $settings := include "hotkv.settings" . | fromJson -}}
{{- $ports := list -}}
{{- $events := $settings.events | default dict -}}
{{- $addresses := dict
      "metrics" (ternary "" (printf ":%v" (int (dig "http" "port" 9433 $settings))) (eq (include "hotkv.local" $settings) "true"))
      "grpc" ($settings.tcp_address | default "")
      "events" (include "hotkv.bound" $events.endpoint)
      "replay" (include "hotkv.bound" $events.replay_endpoint) -}}
{{- range $name := list "metrics" "grpc" "events" "replay" -}}
{{- with regexFind ":[1-9][0-9]*$" (get $addresses $name | default "") | trimPrefix ":" -}}
{{- $ports = append $ports (dict "name" $name "port" (int .)) -}}
{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* Fails if an `extra` value replaces what the chart sets. The chart computes the pod from these settings, so a flag must not change them. */}}
{{- define "hotkv.checkExtras" -}}
{{- range .Values.extraEnv -}}
{{- if hasPrefix "HOTKV_" .name -}}
{{- fail (printf "extraEnv: %s would override a setting; give it in `settings`, or in `secrets` if it is secret" .name) -}}
{{- else if has .name (list "NUMBA_CACHE_DIR" "NVIDIA_VISIBLE_DEVICES" "NVIDIA_DRIVER_CAPABILITIES" "CUPY_CACHE_DIR" "CUDA_CACHE_PATH") -}}
{{- fail (printf "extraEnv: the chart itself sets %s" .name) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- if regexMatch "^--(config|check|help|runtime.dir|arena\\.(dir|bytes)|tiers\\.disk\\.(path|bytes)|drain.timeout.s|http\\.(host|port)|tcp.address|events\\.|security\\.admin.socket)" . -}}
{{- fail (printf "extraArgs: %s changes what the chart computes the pod from; give it in `settings` or `directories`" .) -}}
{{- end -}}
{{- end -}}
{{- $own := list "arena" "sockets" "disk" "admin" "settings" "secrets" "kernels" "tmp" -}}
{{- $there := $own -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $own -}}
{{- fail (printf "extraVolumes: the chart itself has a volume %s; choose another name" .name) -}}
{{- end -}}
{{- $there = append $there .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $there) -}}
{{- fail (printf "extraVolumeMounts: extraVolumes has no %s" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails, naming the value in `of`, if nobody outside the pod can read metrics. */}}
{{- define "hotkv.checkMetrics" -}}
{{- $names := list -}}
{{- range include "hotkv.ports" .root | fromJsonArray -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if not (has "metrics" $names) -}}
{{- fail (printf "%s.enabled: Prometheus can reach no metrics with these settings of http; set settings.http.host to 0.0.0.0 and settings.http.port to a fixed port, or leave %s out" .of .of) -}}
{{- end -}}
{{- with .root.Values.networkPolicy -}}
{{- if and .enabled (not .from.metrics) -}}
{{- fail (printf "%s.enabled: the NetworkPolicy keeps Prometheus out; name its namespace in networkPolicy.from.metrics" $.of) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How a probe asks: by HTTP where the kubelet can reach it, or by a command, which starts Python. */}}
{{- define "hotkv.probe" -}}
{{- $settings := include "hotkv.settings" .root | fromJson -}}
{{- if and (gt (int (dig "http" "port" 9433 $settings)) 0) (ne (include "hotkv.local" $settings) "true") -}}
httpGet: {path: {{ .path }}, port: metrics}
{{- else -}}
exec: {command: {{ concat (list "hotkv" "ping") .flags (list "--timeout-s" "3") | toJson }}}
{{- end -}}
{{- end -}}

{{/* A size of the settings in MiB, rounded up. */}}
{{- define "hotkv.mib" -}}
{{- $size := regexFind "^[0-9]+" (toString .) | int64 -}}
{{- $unit := regexReplaceAll "^[0-9]+\\s*" (toString .) "" -}}
{{- $factors := dict "KiB" 1 "MiB" 1024 "GiB" 1048576 "TiB" 1073741824 -}}
{{- if not (hasKey $factors $unit) -}}
{{- fail (printf "settings: the size %v must be a whole number of KiB, MiB, GiB or TiB, or give `resources` with the pod's memory" .) -}}
{{- end -}}
{{- div (add (mul $size (get $factors $unit)) 1023) 1024 -}}
{{- end -}}

{{/* Memory of the pod: the arena; for the index 1/128 of it and of the disk tier; 2 GiB. */}}
{{- define "hotkv.memory" -}}
{{- $settings := include "hotkv.settings" . | fromJson -}}
{{- $arena := include "hotkv.mib" $settings.arena.bytes | int64 -}}
{{- $below := 0 -}}
{{- if .Values.directories.disk -}}
{{- $below = include "hotkv.mib" ((($settings.tiers | default dict).disk | default dict).bytes | default "100GiB") | int64 -}}
{{- end -}}
{{- printf "%dMi" (add $arena (div $arena 128) (div $below 128) 2048) -}}
{{- end -}}
