"""The known fields of each type: what manifests of dropforge and its users may contain.

"name:type", "!" for required. Types: str int bool quantity port (int or string) time any map (of strings) bytes (a map
of base64) quantities (a map), A|B (an enumeration), another type's name, [T] a list, [T/key] a list that a strategic
merge patch merges by `key` ("[str/]": as a set), {T} a map. A field outside of these tables is refused, never dropped.
"""

from __future__ import annotations

TYPES = {
    "ObjectMeta": """
        name:str generateName:str namespace:str labels:map annotations:map finalizers:[str/]
        ownerReferences:[OwnerReference/uid] uid:str resourceVersion:str generation:int creationTimestamp:time
        deletionTimestamp:time deletionGracePeriodSeconds:int managedFields:any selfLink:str""",
    "OwnerReference": "apiVersion:str! kind:str! name:str! uid:str! controller:bool blockOwnerDeletion:bool",
    "LabelSelector": "matchLabels:map matchExpressions:[LabelSelectorRequirement]",
    "LabelSelectorRequirement": "key:str! operator:In|NotIn|Exists|DoesNotExist! values:[str]",
    "LocalObjectReference": "name:str",
    "ObjectReference": "apiVersion:str kind:str name:str namespace:str uid:str resourceVersion:str fieldPath:str",
    # Pods
    "Pod": "metadata:ObjectMeta spec:PodSpec! status:any",
    "PodTemplateSpec": "metadata:ObjectMeta spec:PodSpec!",
    "PodSpec": """
        containers:[Container/name]! initContainers:[Container/name] volumes:[Volume/name] nodeSelector:map
        restartPolicy:Always|OnFailure|Never terminationGracePeriodSeconds:int activeDeadlineSeconds:int
        serviceAccountName:str serviceAccount:str automountServiceAccountToken:bool hostname:str subdomain:str
        tolerations:[Toleration] imagePullSecrets:[LocalObjectReference/name] securityContext:PodSecurityContext
        priorityClassName:str priority:int preemptionPolicy:PreemptLowerPriority|Never schedulerName:str nodeName:str
        dnsPolicy:ClusterFirst|ClusterFirstWithHostNet|Default|None enableServiceLinks:bool setHostnameAsFQDN:bool
        shareProcessNamespace:bool runtimeClassName:str hostNetwork:bool hostIPC:bool hostPID:bool""",
    "Toleration": """
        key:str operator:Exists|Equal value:str effect:NoSchedule|PreferNoSchedule|NoExecute tolerationSeconds:int""",
    "PodSecurityContext": """
        runAsUser:int runAsGroup:int runAsNonRoot:bool fsGroup:int fsGroupChangePolicy:OnRootMismatch|Always
        supplementalGroups:[int] seccompProfile:SeccompProfile""",
    "SeccompProfile": "type:Localhost|RuntimeDefault|Unconfined! localhostProfile:str",
    "Container": """
        name:str! image:str command:[str] args:[str] workingDir:str ports:[ContainerPort/containerPort]
        env:[EnvVar/name] envFrom:[EnvFromSource] resources:ResourceRequirements volumeMounts:[VolumeMount/mountPath]
        livenessProbe:Probe readinessProbe:Probe startupProbe:Probe lifecycle:Lifecycle
        imagePullPolicy:Always|IfNotPresent|Never securityContext:SecurityContext terminationMessagePath:str
        terminationMessagePolicy:File|FallbackToLogsOnError stdin:bool stdinOnce:bool tty:bool""",
    "ContainerPort": "containerPort:int! name:str protocol:TCP|UDP|SCTP hostPort:int hostIP:str",
    "EnvVar": "name:str! value:str valueFrom:EnvVarSource",
    "EnvVarSource": """
        secretKeyRef:SecretKeySelector configMapKeyRef:ConfigMapKeySelector fieldRef:ObjectFieldSelector
        resourceFieldRef:ResourceFieldSelector""",
    "SecretKeySelector": "name:str key:str! optional:bool",
    "ConfigMapKeySelector": "name:str key:str! optional:bool",
    "ObjectFieldSelector": "fieldPath:str! apiVersion:str",
    "ResourceFieldSelector": "resource:str! containerName:str divisor:quantity",
    "EnvFromSource": "prefix:str secretRef:SecretEnvSource configMapRef:ConfigMapEnvSource",
    "SecretEnvSource": "name:str optional:bool",
    "ConfigMapEnvSource": "name:str optional:bool",
    "ResourceRequirements": "limits:quantities requests:quantities",
    "VolumeMount": "name:str! mountPath:str! subPath:str readOnly:bool",
    "SecurityContext": """
        runAsUser:int runAsGroup:int runAsNonRoot:bool privileged:bool allowPrivilegeEscalation:bool
        readOnlyRootFilesystem:bool capabilities:Capabilities seccompProfile:SeccompProfile""",
    "Capabilities": "add:[str] drop:[str]",
    "Lifecycle": "postStart:LifecycleHandler preStop:LifecycleHandler",
    "LifecycleHandler": "exec:ExecAction httpGet:HTTPGetAction sleep:SleepAction tcpSocket:TCPSocketAction",
    "SleepAction": "seconds:int!",
    "Probe": """
        httpGet:HTTPGetAction tcpSocket:TCPSocketAction exec:ExecAction grpc:GRPCAction initialDelaySeconds:int
        periodSeconds:int timeoutSeconds:int failureThreshold:int successThreshold:int
        terminationGracePeriodSeconds:int""",
    "HTTPGetAction": "path:str port:port! host:str scheme:HTTP|HTTPS httpHeaders:[HTTPHeader]",
    "HTTPHeader": "name:str! value:str!",
    "TCPSocketAction": "port:port! host:str",
    "ExecAction": "command:[str]",
    "GRPCAction": "port:int! service:str",
    "Volume": """
        name:str! emptyDir:EmptyDirVolumeSource secret:SecretVolumeSource configMap:ConfigMapVolumeSource
        csi:CSIVolumeSource persistentVolumeClaim:PersistentVolumeClaimVolumeSource hostPath:HostPathVolumeSource
        nfs:NFSVolumeSource ephemeral:EphemeralVolumeSource""",
    "EmptyDirVolumeSource": "medium:str sizeLimit:quantity",
    "SecretVolumeSource": "secretName:str optional:bool defaultMode:int items:[KeyToPath]",
    "ConfigMapVolumeSource": "name:str optional:bool defaultMode:int items:[KeyToPath]",
    "KeyToPath": "key:str! path:str! mode:int",
    "CSIVolumeSource": """
        driver:str! fsType:str readOnly:bool volumeAttributes:map nodePublishSecretRef:LocalObjectReference""",
    "PersistentVolumeClaimVolumeSource": "claimName:str! readOnly:bool",
    "HostPathVolumeSource": "path:str! type:str",
    "NFSVolumeSource": "server:str! path:str! readOnly:bool",
    "EphemeralVolumeSource": "volumeClaimTemplate:PersistentVolumeClaimTemplate",
    "PersistentVolumeClaimTemplate": "metadata:ObjectMeta spec:PersistentVolumeClaimSpec!",
    # Claims of volumes
    "PersistentVolumeClaim": "metadata:ObjectMeta spec:PersistentVolumeClaimSpec! status:any",
    "PersistentVolumeClaimSpec": """
        accessModes:[str] resources:VolumeResourceRequirements storageClassName:str volumeMode:str volumeName:str
        selector:LabelSelector""",
    "VolumeResourceRequirements": "limits:quantities requests:quantities",
    "PersistentVolume": "metadata:ObjectMeta spec:PersistentVolumeSpec! status:any",
    "PersistentVolumeSpec": """
        accessModes:[str] capacity:quantities claimRef:ObjectReference csi:CSIPersistentVolumeSource
        persistentVolumeReclaimPolicy:str storageClassName:str volumeMode:str""",
    "CSIPersistentVolumeSource": "driver:str! volumeHandle:str! fsType:str",
    "StorageClass": """
        metadata:ObjectMeta provisioner:str! parameters:map reclaimPolicy:str volumeBindingMode:str
        allowVolumeExpansion:bool""",
    # Jobs
    "Job": "metadata:ObjectMeta spec:JobSpec! status:any",
    "JobSpec": """
        template:PodTemplateSpec! parallelism:int completions:int completionMode:NonIndexed|Indexed backoffLimit:int
        activeDeadlineSeconds:int ttlSecondsAfterFinished:int suspend:bool podFailurePolicy:PodFailurePolicy
        podReplacementPolicy:Failed|TerminatingOrFailed selector:LabelSelector manualSelector:bool""",
    "PodFailurePolicy": "rules:[PodFailurePolicyRule]!",
    "PodFailurePolicyRule": """
        action:Count|FailIndex|FailJob|Ignore! onExitCodes:PodFailurePolicyOnExitCodesRequirement
        onPodConditions:[PodFailurePolicyOnPodConditionsPattern]""",
    "PodFailurePolicyOnExitCodesRequirement": "containerName:str operator:In|NotIn! values:[int]!",
    "PodFailurePolicyOnPodConditionsPattern": "type:str! status:str",
    # Deployments
    "Deployment": "metadata:ObjectMeta spec:DeploymentSpec! status:any",
    "DeploymentSpec": """
        replicas:int selector:LabelSelector! template:PodTemplateSpec! strategy:DeploymentStrategy minReadySeconds:int
        revisionHistoryLimit:int paused:bool progressDeadlineSeconds:int""",
    "DeploymentStrategy": "type:Recreate|RollingUpdate rollingUpdate:RollingUpdateDeployment",
    "RollingUpdateDeployment": "maxSurge:port maxUnavailable:port",
    "ReplicaSet": "metadata:ObjectMeta spec:ReplicaSetSpec! status:any",
    "ReplicaSetSpec": "replicas:int selector:LabelSelector! template:PodTemplateSpec minReadySeconds:int",
    "HorizontalPodAutoscaler": "metadata:ObjectMeta spec:HorizontalPodAutoscalerSpec! status:any",
    "HorizontalPodAutoscalerSpec": """
        scaleTargetRef:CrossVersionObjectReference! minReplicas:int maxReplicas:int! metrics:[MetricSpec]
        behavior:HorizontalPodAutoscalerBehavior""",
    "CrossVersionObjectReference": "apiVersion:str kind:str! name:str!",
    "MetricSpec": """
        type:ContainerResource|External|Object|Pods|Resource! containerResource:ContainerResourceMetricSource
        external:ExternalMetricSource object:ObjectMetricSource pods:PodsMetricSource resource:ResourceMetricSource""",
    "ContainerResourceMetricSource": "container:str! name:str! target:MetricTarget!",
    "ExternalMetricSource": "metric:MetricIdentifier! target:MetricTarget!",
    "ObjectMetricSource": """
        describedObject:CrossVersionObjectReference! metric:MetricIdentifier! target:MetricTarget!""",
    "PodsMetricSource": "metric:MetricIdentifier! target:MetricTarget!",
    "ResourceMetricSource": "name:str! target:MetricTarget!",
    "MetricIdentifier": "name:str! selector:LabelSelector",
    "MetricTarget": "type:Utilization|Value|AverageValue! value:quantity averageValue:quantity averageUtilization:int",
    "HorizontalPodAutoscalerBehavior": "scaleUp:HPAScalingRules scaleDown:HPAScalingRules",
    "HPAScalingRules": """
        selectPolicy:Max|Min|Disabled stabilizationWindowSeconds:int policies:[HPAScalingPolicy]""",
    "HPAScalingPolicy": "type:Pods|Percent! value:int! periodSeconds:int!",
    # Network policies are stored and not enforced: all pods share this machine.
    "NetworkPolicy": "metadata:ObjectMeta spec:NetworkPolicySpec",
    "NetworkPolicySpec": """
        podSelector:LabelSelector policyTypes:[str] ingress:[NetworkPolicyIngressRule]
        egress:[NetworkPolicyEgressRule]""",
    "NetworkPolicyIngressRule": "from:[NetworkPolicyPeer] ports:[NetworkPolicyPort]",
    "NetworkPolicyEgressRule": "to:[NetworkPolicyPeer] ports:[NetworkPolicyPort]",
    "NetworkPolicyPeer": "podSelector:LabelSelector namespaceSelector:LabelSelector ipBlock:IPBlock",
    "NetworkPolicyPort": "protocol:TCP|UDP|SCTP port:port endPort:int",
    "IPBlock": "cidr:str! except:[str]",
    "Lease": "metadata:ObjectMeta spec:LeaseSpec",
    "LeaseSpec": """
        holderIdentity:str leaseDurationSeconds:int acquireTime:time renewTime:time leaseTransitions:int
        preferredHolder:str strategy:str""",
    # The Gateway API (gateway.networking.k8s.io/v1)
    "Gateway": "metadata:ObjectMeta spec:GatewaySpec! status:any",
    "GatewaySpec": "gatewayClassName:str! listeners:[GatewayListener/name]!",
    "GatewayListener": "name:str! port:int! protocol:str! hostname:str allowedRoutes:AllowedRoutes",
    "AllowedRoutes": "namespaces:RouteNamespaces kinds:[RouteGroupKind]",
    "RouteNamespaces": "from:All|Selector|Same selector:LabelSelector",
    "RouteGroupKind": "group:str kind:str!",
    "HTTPRoute": "metadata:ObjectMeta spec:HTTPRouteSpec! status:any",
    "HTTPRouteSpec": "parentRefs:[ParentReference] hostnames:[str] rules:[HTTPRouteRule]",
    "ParentReference": "group:str kind:str namespace:str name:str! sectionName:str port:int",
    "HTTPRouteRule": """
        name:str matches:[HTTPRouteMatch] filters:[HTTPRouteFilter] backendRefs:[HTTPBackendRef]""",
    "HTTPRouteMatch": "path:HTTPPathMatch",
    "HTTPPathMatch": "type:Exact|PathPrefix|RegularExpression value:str",
    "HTTPRouteFilter": """
        type:RequestHeaderModifier|ResponseHeaderModifier|RequestMirror|RequestRedirect|URLRewrite|ExtensionRef|CORS!
        urlRewrite:HTTPURLRewriteFilter""",
    "HTTPURLRewriteFilter": "hostname:str path:HTTPPathModifier",
    "HTTPPathModifier": "type:ReplaceFullPath|ReplacePrefixMatch! replaceFullPath:str replacePrefixMatch:str",
    "HTTPBackendRef": "group:str kind:str name:str! namespace:str port:int weight:int",
    # Google's policies for it (networking.gke.io/v1)
    "PolicyTarget": "group:str kind:str! name:str! namespace:str",
    "GCPBackendPolicy": "metadata:ObjectMeta spec:GCPBackendPolicySpec! status:any",
    "GCPBackendPolicySpec": "targetRef:PolicyTarget! default:GCPBackendPolicyConfig",
    "GCPBackendPolicyConfig": "timeoutSec:int connectionDraining:ConnectionDraining",
    "ConnectionDraining": "drainingTimeoutSec:int",
    "GCPGatewayPolicy": "metadata:ObjectMeta spec:GCPGatewayPolicySpec! status:any",
    "GCPGatewayPolicySpec": "targetRef:PolicyTarget! default:GCPGatewayPolicyConfig",
    "GCPGatewayPolicyConfig": "sslPolicy:str allowGlobalAccess:bool region:str",
    "HealthCheckPolicy": "metadata:ObjectMeta spec:HealthCheckPolicySpec! status:any",
    "HealthCheckPolicySpec": "targetRef:PolicyTarget! default:HealthCheckPolicyConfig",
    "HealthCheckPolicyConfig": """
        checkIntervalSec:int timeoutSec:int unhealthyThreshold:int healthyThreshold:int config:HealthCheck""",
    "HealthCheck": "type:TCP|HTTP|HTTPS|HTTP2|GRPC httpHealthCheck:HTTPHealthCheck",
    "HTTPHealthCheck": """
        portSpecification:USE_FIXED_PORT|USE_NAMED_PORT|USE_SERVING_PORT port:int portName:str host:str
        requestPath:str proxyHeader:NONE|PROXY_V1 response:str""",
    # Ray (ray.io/v1)
    "RayJob": "metadata:ObjectMeta spec:RayJobSpec! status:any",
    "RayJobSpec": """
        rayClusterSpec:RayClusterSpec clusterSelector:map entrypoint:str metadata:map runtimeEnvYAML:str jobId:str
        submissionMode:str backoffLimit:int activeDeadlineSeconds:int preRunningDeadlineSeconds:int
        ttlSecondsAfterFinished:int shutdownAfterJobFinishes:bool suspend:bool managedBy:str entrypointNumCpus:any
        entrypointNumGpus:any entrypointResources:str submitterPodTemplate:any submitterConfig:any
        deletionStrategy:any""",
    "RayCluster": "metadata:ObjectMeta spec:RayClusterSpec! status:any",
    "RayClusterSpec": """
        headGroupSpec:HeadGroupSpec! workerGroupSpecs:[WorkerGroupSpec] rayVersion:str suspend:bool
        authOptions:RayAuthOptions enableInTreeAutoscaling:bool autoscalerOptions:any gcsFaultToleranceOptions:any
        managedBy:str headServiceAnnotations:map historyServerOptions:any networkPolicy:any tlsOptions:any
        upgradeStrategy:any""",
    "RayAuthOptions": "mode:disabled|token secretName:str enableK8sTokenAuth:bool",
    "HeadGroupSpec": """
        template:PodTemplateSpec! rayStartParams:map serviceType:str headService:any enableIngress:bool
        ingressOptions:any resources:map labels:map""",
    "WorkerGroupSpec": """
        groupName:str! template:PodTemplateSpec! rayStartParams:map replicas:int minReplicas:int maxReplicas:int
        numOfHosts:int idleTimeoutSeconds:int priority:int suspend:bool scaleStrategy:any resources:map labels:map""",
    # The rest of core
    "Service": "metadata:ObjectMeta spec:ServiceSpec! status:any",
    "ServiceSpec": """
        ports:[ServicePort/port] selector:map type:ClusterIP|LoadBalancer|NodePort|ExternalName clusterIP:str
        clusterIPs:[str] externalName:str sessionAffinity:None|ClientIP publishNotReadyAddresses:bool ipFamilies:[str]
        ipFamilyPolicy:SingleStack|PreferDualStack|RequireDualStack internalTrafficPolicy:Cluster|Local
        externalTrafficPolicy:Cluster|Local loadBalancerIP:str loadBalancerClass:str loadBalancerSourceRanges:[str]
        allocateLoadBalancerNodePorts:bool""",
    "ServicePort": "port:int! targetPort:port name:str protocol:TCP|UDP|SCTP nodePort:int appProtocol:str",
    "ConfigMap": "metadata:ObjectMeta data:map binaryData:bytes immutable:bool",
    "Secret": "metadata:ObjectMeta type:str data:bytes stringData:map immutable:bool",
    "ServiceAccount": """
        metadata:ObjectMeta secrets:[ObjectReference/name] imagePullSecrets:[LocalObjectReference]
        automountServiceAccountToken:bool""",
    "Namespace": "metadata:ObjectMeta spec:NamespaceSpec status:any",
    "NamespaceSpec": "finalizers:[str]",
    "Node": "metadata:ObjectMeta spec:NodeSpec status:any",
    "NodeSpec": "providerID:str podCIDR:str podCIDRs:[str/] unschedulable:bool taints:[Taint]",
    "Taint": "key:str! value:str effect:NoSchedule|PreferNoSchedule|NoExecute! timeAdded:time",
    "Event": """
        metadata:ObjectMeta involvedObject:ObjectReference! reason:str message:str source:EventSource type:str
        firstTimestamp:time lastTimestamp:time count:int eventTime:time action:str related:ObjectReference
        reportingComponent:str reportingInstance:str series:any""",
    "EventSource": "component:str host:str",
}

# Fields that the real API supports and this server does not: refused with 501 instead of "unknown".
NOT_EMULATED = {
    "PodSpec": """
        affinity topologySpreadConstraints ephemeralContainers resourceClaims schedulingGates readinessGates overhead
        dnsConfig hostAliases os hostUsers resources hostnameOverride workloadRef""",
    "Container": "restartPolicy restartPolicyRules volumeDevices resizePolicy",
    "EnvVarSource": "fileKeyRef",
    "ResourceRequirements": "claims",
    "VolumeMount": "subPathExpr mountPropagation recursiveReadOnly",
    "Volume": """
        awsElasticBlockStore azureDisk azureFile cephfs cinder downwardAPI fc flexVolume flocker
        gcePersistentDisk gitRepo glusterfs image iscsi photonPersistentDisk portworxVolume projected quobyte rbd
        scaleIO storageos vsphereVolume""",
    "GatewaySpec": "addresses infrastructure tls allowedListeners",
    "GatewayListener": "tls",
    "HTTPRouteRule": "timeouts",
    "HTTPRouteMatch": "headers queryParams method",
    "HTTPRouteFilter": """
        requestHeaderModifier responseHeaderModifier requestMirror requestRedirect extensionRef cors""",
    "HTTPBackendRef": "filters",
    "GCPBackendPolicyConfig": """
        logging sessionAffinity securityPolicy iap maxRatePerEndpoint backendPreference""",
    "HealthCheckPolicyConfig": "logConfig",
    "HealthCheck": "tcpHealthCheck httpsHealthCheck http2HealthCheck grpcHealthCheck",
    "PersistentVolumeClaimSpec": "dataSource dataSourceRef volumeAttributesClassName",
    "JobSpec": "successPolicy backoffLimitPerIndex maxFailedIndexes managedBy",
    "ServiceSpec": "externalIPs healthCheckNodePort sessionAffinityConfig trafficDistribution",
}
