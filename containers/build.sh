#!/usr/bin/env bash
# Build and push one image, in Cloud Build: containers/build.sh ROLE. Leaves `"ROLE": "image@digest"` in digests/.
#
# REPOSITORY is host/project/repository; BUILD_ID is Cloud Build's. The script pins the base image to the current digest
# of its tag and writes that digest into a label. The layers of the last build are the cache.
set -euo pipefail

role=$1 image="$REPOSITORY/${1//_/-}"
tag=$(sed -n 's/^ARG BASE=//p' "containers/$role/Dockerfile")
docker pull --quiet "$tag"
base=$(docker inspect --format '{{index .RepoDigests 0}}' "$tag")
docker pull --quiet "$image:latest" || echo "there is no $image:latest for the cache"

DOCKER_BUILDKIT=1 docker build . --file "containers/$role/Dockerfile" \
    --build-arg "BASE=$base" --label "org.opencontainers.image.base.name=$base" \
    --build-arg BUILDKIT_INLINE_CACHE=1 --cache-from "$image:latest" \
    --tag "$image:$BUILD_ID" --tag "$image:latest"
docker push "$image:$BUILD_ID"
docker push "$image:latest"

mkdir -p digests
digest=$(docker inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$image:$BUILD_ID" | grep "^$image@sha256:")
echo "\"$role\": \"$digest\"" >"digests/$role"
