{{- define "engine.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{- define "engine.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "engine.labels" -}}
{{ include "engine.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* A number of a values file is a float: Helm alone would write 1048576 as 1.048576e+06 */ -}}
{{- define "engine.argument" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . | quote }}{{ else }}{{ . | quote }}{{ end -}}
{{- end }}
