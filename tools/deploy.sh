#!/usr/bin/env bash
# Deploy dropforge: tools/deploy.sh registry|images|deploy|destroy PROJECT_ID REGION
#
#   registry   create the registry and the account that builds images (once)
#   images     build the images with Cloud Build, which records their digests
#   deploy     create or update the deployment, with the images of the newest successful build
#   destroy    delete the deployment, apart from the bucket of Terraform's state
#
# The script shows Terraform's plan and applies it only after the answer "yes". PREFIX names the deployment (dropforge).
# The state is in gs://PROJECT_ID-PREFIX-state. The digests of the images come from Cloud Build's own record of what it
# pushed: the account that builds can write neither that record nor the bucket that the functions' source comes from.
set -euo pipefail
cd "$(dirname "$0")/.."

step=${1:-} project=${2:-} region=${3:-} prefix=${PREFIX:-dropforge}
if [[ -z $region || ! $step =~ ^(registry|images|deploy|destroy)$ ]]; then
    echo "usage: make registry|images|deploy|destroy PROJECT_ID=my-project REGION=us-central1" >&2
    exit 64
fi
state="$project-$prefix-state" build="$project-$prefix-build"
repository="$region-docker.pkg.dev/$project/$prefix"
work="$PWD/build/terraform/$project-$prefix"
export TF_DATA_DIR="$work/data" TF_IN_AUTOMATION=1
mkdir -p "$work"

make_state_bucket() {
    if ! gcloud storage buckets describe "gs://$state" --project="$project" --format="value(name)" >/dev/null 2>&1; then
        gcloud storage buckets create "gs://$state" --project="$project" --location="$region" \
            --uniform-bucket-level-access --public-access-prevention
        gcloud storage buckets update "gs://$state" --versioning
    fi
}

# Stop before the plan if Google supports a permission of terraform/permissions.yaml in no custom role.
check_custom_roles() {
    local refused
    if ! refused=$(gcloud iam list-testable-permissions "//cloudresourcemanager.googleapis.com/projects/$project" \
        --filter="customRolesSupportLevel=NOT_SUPPORTED" --format="value(name)"); then
        echo "Google did not say which permissions custom roles may have; the apply will show it." >&2
        return
    fi
    refused=$(grep -Fx "$refused" <(sed -nE 's/^ {8}([a-z]+(\.[A-Za-z]+)+):.*/\1/p' terraform/permissions.yaml) || true)
    if [[ -n $refused ]]; then
        echo "Google supports these permissions of terraform/permissions.yaml in no custom role:" "$refused" >&2
        echo "Bind a predefined role that has them, as terraform/iam.tf does for data_buckets." >&2
        exit 1
    fi
}

# Stop before the plan if the policy is wrong: the functions would then accept no spec.
check_policy() {
    local dropforge=build/venv/bin/dropforge
    if [[ ! -e terraform/policy.yaml ]]; then
        return
    fi
    if [[ ! -x $dropforge ]]; then
        echo "terraform/policy.yaml cannot be checked without $dropforge: run \`make setup\` first (docs/policy.md)." >&2
        exit 1
    fi
    "$dropforge" policy check --file terraform/policy.yaml
}

# apply [ARGUMENT...]: plan with these arguments, ask, and apply the shown plan.
apply() {
    terraform -chdir=terraform init -input=false -reconfigure -lockfile=readonly -backend-config="bucket=$state"
    terraform -chdir=terraform plan -input=false -out="$work/plan" \
        -var="project_id=$project" -var="region=$region" -var="prefix=$prefix" "$@"
    local answer=""
    read -r -p "Apply this plan to project $project? Only \"yes\" applies it: " answer || true
    if [[ $answer != yes ]]; then
        echo "Nothing was applied."
        exit 1
    fi
    terraform -chdir=terraform apply -input=false "$work/plan"
}

# write_digests FILE: write the images of the newest successful build as variables of Terraform.
write_digests() {
    local id role digest images=""
    id=$(gcloud builds list --project="$project" --region="$region" --sort-by=~create_time --limit=1 --format="value(id)" \
        --filter="status=SUCCESS AND substitutions._REPOSITORY=\"$repository\"")
    if [[ -z $id ]]; then
        echo "There are no images yet: run \`make registry\` and \`make images\` first (docs/deploy.md)." >&2
        exit 1
    fi
    while IFS=: read -r role digest; do
        images+="${images:+, }\"${role//-/_}\": \"$repository/$role@sha256:$digest\""
    done < <(gcloud builds describe "$id" --project="$project" --region="$region" --flatten="results.images[]" \
        --format="csv[no-heading](results.images.name,results.images.digest)" |
        sed -nE "s#^$repository/([a-z0-9-]+):$id,sha256:([0-9a-f]{64})\$#\1:\2#p")
    if [[ -z $images ]]; then
        echo "Build $id names no image of $repository in its results; run \`make images\` again." >&2
        exit 1
    fi
    echo "{\"images\": {$images}}" >"$1"
}

case $step in
registry)
    make_state_bucket
    apply -target=terraform_data.registry
    ;;
images)
    gcloud builds submit . --project="$project" --region="$region" --config=cloudbuild.yaml \
        --service-account="projects/$project/serviceAccounts/$prefix-build@$project.iam.gserviceaccount.com" \
        --gcs-source-staging-dir="gs://$build/source" \
        --substitutions="_REPOSITORY=$repository"
    ;;
deploy)
    check_policy
    make_state_bucket
    write_digests "$work/images.tfvars.json"
    check_custom_roles
    apply -var-file="$work/images.tfvars.json"
    terraform -chdir=terraform output -raw dropforge_toml >"$work/dropforge.toml"
    terraform -chdir=terraform output -raw kubernetes_manifest >"$work/kubernetes.yaml"
    echo "To use the dropforge command with this deployment: cp ${work#"$PWD/"}/dropforge.toml ."
    if [[ -s $work/kubernetes.yaml ]]; then
        echo "To prepare a cluster: kubectl apply -f ${work#"$PWD/"}/kubernetes.yaml (docs/deploy.md)"
    fi
    ;;
destroy)
    apply -destroy
    ;;
esac
