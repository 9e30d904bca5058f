#!/usr/bin/env bash
# Build one image, in Cloud Build: containers/build.sh ROLE. Cloud Build pushes the image and records its digest.
#
# REPOSITORY is host/project/repository; BUILD_ID is Cloud Build's. The base is the one that the Dockerfile names by
# digest, and a label repeats it. The layers of the last build are the cache.
set -euo pipefail

role=$1 image="$REPOSITORY/${1//_/-}"
base=$(sed -n 's/^ARG BASE=//p' "containers/$role/Dockerfile")
expected=${base#*@}

stop() {
    echo "containers/$role/Dockerfile expects its base ${base%@*} with digest $expected, but $1." \
        "Choose a base and its digest as containers/bases.toml says." >&2
    exit 1
}

[[ $expected =~ ^sha256:[0-9a-f]{64}$ ]] || stop "that is no digest"
docker pull --quiet "$base" || stop "the registry does not give it"
found=$(docker inspect --format '{{join .RepoDigests " "}}' "$base")
[[ " $found " == *"@$expected "* ]] || stop "the registry gave $found"
docker pull --quiet "$image:latest" || echo "there is no $image:latest for the cache"

DOCKER_BUILDKIT=1 docker build . --file "containers/$role/Dockerfile" \
    --label "org.opencontainers.image.base.name=$base" \
    --build-arg BUILDKIT_INLINE_CACHE=1 --cache-from "$image:latest" \
    --tag "$image:$BUILD_ID" --tag "$image:latest"
