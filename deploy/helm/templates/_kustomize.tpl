{{/* The manifests are those of ../kubernetes: these templates do with them what kustomize does. */}}

{{/* Applies an operation of a JSON patch, in place: list of the manifest and the operation. */}}
{{- define "snapcap.operation" -}}
{{- $at := index . 0 }}
{{- $operation := index . 1 }}
{{- $holder := $at }}
{{- $key := "" }}
{{- $steps := splitList "/" (trimPrefix "/" $operation.path) }}
{{- range initial $steps }}
  {{- $holder = $at }}
  {{- $key = replace "~1" "/" . }}
  {{- if kindIs "slice" $at }}
    {{- $at = index $at (atoi .) }}
  {{- else }}
    {{- $at = get $at $key }}
  {{- end }}
{{- end }}
{{- $last := last $steps | replace "~1" "/" }}
{{- if eq $last "-" }}
  {{- $_ := set $holder $key (append $at $operation.value) }}
{{- else if eq $operation.op "remove" }}
  {{- $_ := unset $at $last }}
{{- else }}
  {{- $_ := set $at $last $operation.value }}
{{- end }}
{{- end }}

{{/* Adds the manifests of a folder to `all.items`, with those of its components, its labels and its patches. */}}
{{- define "snapcap.folder" -}}
{{- $root := .root }}
{{- $all := .all }}
{{- $folder := .folder }}
{{- $before := len $all.items }}
{{- $kustomization := $root.Files.Get (printf "kubernetes/%s/kustomization.yaml" $folder) | fromYaml }}
{{- if not $kustomization.kind }}
  {{- fail (printf "there is no component %s" (base $folder)) }}
{{- end }}
{{- range $kustomization.resources }}
  {{- $_ := set $all "items" (append $all.items ($root.Files.Get (printf "kubernetes/%s/%s" $folder .) | fromYaml)) }}
{{- end }}
{{- range $kustomization.components }}
  {{- include "snapcap.folder" (dict "root" $root "all" $all "folder" (clean (printf "%s/%s" $folder .))) }}
{{- end }}
{{- range $label := $kustomization.labels }}
  {{- range slice $all.items $before }}
    {{- $_ := set .metadata "labels" (merge (dict) $label.pairs (default dict .metadata.labels)) }}
    {{- if dig "spec" "template" nil . }}
      {{- $metadata := default dict .spec.template.metadata }}
      {{- $_ := set $metadata "labels" (merge (dict) $label.pairs (default dict $metadata.labels)) }}
      {{- $_ := set .spec.template "metadata" $metadata }}
    {{- end }}
  {{- end }}
{{- end }}
{{- range $patch := $kustomization.patches }}
  {{- range $item := $all.items }}
    {{- if and (regexMatch (printf "^(%s)$" $patch.target.kind) $item.kind) (eq (default $item.metadata.name $patch.target.name) $item.metadata.name) }}
      {{- range fromYamlArray $patch.patch }}
        {{- include "snapcap.operation" (list $item .) }}
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Returns a value as text. Helm reads the numbers of a values file as floating-point numbers, and `toString` would
     write 20971520 as 2.097152e+07. */}}
{{- define "snapcap.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}
