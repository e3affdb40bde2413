{{- define "kvtier.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "kvtier.secret" -}}
{{- .Values.secrets.existing | default (include "kvtier.name" .) -}}
{{- end }}

{{/* Whether there is a controller: "true", or empty. */}}
{{- define "kvtier.controlled" -}}
{{- if or .Values.controller.enabled (eq .Values.mode "disaggregated") }}true{{ end -}}
{{- end }}

{{/* The URLs of all controllers, with spaces between them. */}}
{{- define "kvtier.controllers" -}}
{{- $name := include "kvtier.name" . -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- if $number }} {{ end -}}
http://{{ $name }}-controller-{{ $number }}.{{ $name }}-controller:9000
{{- end -}}
{{- end }}

{{/* Labels that select pods of the release, or of one component: (list $ COMPONENT). */}}
{{- define "kvtier.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- if gt (len .) 1 }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}
{{- end }}

{{- define "kvtier.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvtier.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* kvtier.yaml of a component. What the values say counts more than what the chart adds. */}}
{{- define "kvtier.settings" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $settings := dict "metrics" (dict "listen" "0.0.0.0:9464") -}}
{{- if include "kvtier.controlled" $root -}}
{{- $urls := splitList " " (include "kvtier.controllers" $root) -}}
{{- $_ := set $settings "controller" (dict "url" $urls "token" (dict "env" "CONTROLLER_TOKEN")) -}}
{{- $_ := set $settings "peer" (dict "listen" "0.0.0.0:8201" "secret" (dict "env" "PEER_SECRET")) -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy $root.Values.settings) -}}
{{- if eq $root.Values.mode "disaggregated" -}}
{{- $_ := set $settings "role" (ternary "prefill" "decode" (eq $component "prefiller")) -}}
{{- $settings = mergeOverwrite $settings (deepCopy (index $root.Values $component).settings) -}}
{{- end -}}
{{ toYaml $settings }}
{{- end }}

{{/* What all pods have. Services would otherwise set variables that look like settings. */}}
{{- define "kvtier.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Engines and cache processes of nodes run on the same nodes. */}}
{{- define "kvtier.nodes" -}}
{{- if and (eq .Values.mode "shared") .Values.cache.hostPID }}
hostPID: true
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}

{{/* The settings, their file and the socket, if it is that of the node. Empty counts as not set. */}}
{{- define "kvtier.env" -}}
- {name: KVTIER_CONFIG_FILE, value: /etc/kvtier/kvtier.yaml}
- {name: KVTIER_SOCKET, value: {{ ternary "/run/kvtier/kvtier.sock" "" (eq .Values.mode "shared") | quote }}}
{{- if include "kvtier.controlled" . }}
- name: PEER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "kvtier.secret" . }}, key: peer-secret}}
- name: CONTROLLER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "kvtier.secret" . }}, key: controller-token}}
{{- end }}
{{- end }}

{{/* Ports of whatever contains a cache process. */}}
{{- define "kvtier.cachePorts" -}}
- {name: metrics, containerPort: 9464}
- {name: peer, containerPort: 8201}
{{- end }}

{{- define "kvtier.restricted" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* The pod of an engine: (dict "root" $ "component" … "settings" … "role" … "args" …). */}}
{{- define "kvtier.enginePod" -}}
{{- $root := .root -}}
{{- $engine := $root.Values.engine -}}
metadata:
  labels:
    {{- include "kvtier.labels" (list $root .component) | nindent 4 }}
  annotations:
    checksum/settings: {{ include "kvtier.settings" (list $root .settings) | sha256sum }}
spec:
  {{- include "kvtier.pod" $root | nindent 2 }}
  {{- include "kvtier.nodes" $root | nindent 2 }}
  terminationGracePeriodSeconds: {{ $engine.terminationGracePeriodSeconds }}
  containers:
    - name: vllm
      image: {{ $root.Values.images.engine }}
      command: [vllm, serve, {{ $root.Values.model | quote }}]
      args:
        - --port=8000
        - --enable-prompt-tokens-details
        - --kv-transfer-config
        - {{ dict "kv_connector" "KVTierConnector" "kv_role" .role | toJson | quote }}
        {{- with concat $engine.args .args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "kvtier.env" $root | nindent 8 }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ include "kvtier.secret" $root }}, key: hf-token, optional: true}}
        {{- with $engine.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if ne $root.Values.mode "shared" }}
        {{- include "kvtier.cachePorts" $root | nindent 8 }}
        {{- end }}
      # Loading a model takes minutes.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: 240
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      resources: {{ toJson $engine.resources }}
      securityContext:
        {{- include "kvtier.restricted" $root | nindent 8 }}
      volumeMounts:
        - {name: settings, mountPath: /etc/kvtier, readOnly: true}
        - {name: models, mountPath: /home/kvtier/.cache}
        - {name: shm, mountPath: /dev/shm}
        {{- if eq $root.Values.mode "shared" }}
        - {name: socket, mountPath: /run/kvtier}
        {{- else }}
        - {name: disk, mountPath: /var/cache/kvtier}
        {{- end }}
  volumes:
    - name: settings
      configMap: {name: {{ include "kvtier.name" $root }}-{{ .settings }}}
    - name: models
      {{- if $engine.modelsClaim }}
      persistentVolumeClaim: {claimName: {{ $engine.modelsClaim }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $engine.sharedMemory }}}
    {{- if eq $root.Values.mode "shared" }}
    - name: socket
      hostPath: {path: {{ $root.Values.cache.socketDirectory }}, type: DirectoryOrCreate}
    {{- else }}
    - name: disk
      emptyDir: {}
    {{- end }}
{{- end }}
