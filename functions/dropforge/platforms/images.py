"""The images of containers/ and the GPUs on which each image starts.

An image brings CUDA, and the platform brings NVIDIA's driver. An image starts only where the driver runs its CUDA, and
where its PyTorch has kernels for the GPU. Each platform's catalog has the drivers, GPUS has the architectures, and
IMAGES has the contents of the images. tests/platforms/test_images.py compares IMAGES with containers/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from dropforge.base.errors import SpecProblem

from .facts import Source
from .gpus import GPUS, Gpu

if TYPE_CHECKING:
    from dropforge.spec import JobSpec


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on the machines of a platform, by its branch: 535 stands for 535.216.03."""

    branch: int
    source: Source

    @property
    def newest_cuda(self) -> int:
        """The newest major version of CUDA that the driver runs; 0 if CUDA_DRIVERS knows none."""
        return max((cuda for cuda, least in CUDA_DRIVERS.items() if least.branch <= self.branch), default=0)


@dataclass(frozen=True)
class Image:
    """An image by its role in containers/.

    `pin` is the package or base image that decides the rest. An image for TPUs has neither CUDA nor architectures.
    `architectures` are the compute capabilities for which its PyTorch has kernels. `attention` are the values of
    model.attn_implementation that need a package beyond PyTorch, and that the image has.
    """

    role: str
    pin: str
    source: Source
    cuda: tuple[int, int] | None = None
    architectures: tuple[tuple[int, int], ...] = ()
    attention: tuple[str, ...] = ()

    def has_kernels_for(self, gpu: Gpu) -> bool:
        """Whether its PyTorch runs on a GPU: kernels run on the same major architecture with the same or a later minor.

        https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility
        """
        major, minor = gpu.capability
        return any(built[0] == major and built[1] <= minor for built in self.architectures)

    def starts_on(self, gpu: Gpu, driver: Driver) -> bool:
        """Whether the image starts on a GPU behind a driver."""
        runs = self.cuda is not None and self.cuda[0] <= driver.newest_cuda
        return runs and driver.branch >= gpu.least_driver and self.has_kernels_for(gpu)


@dataclass(frozen=True)
class UnservedTypes:
    """The types of text models that transformers reads in training, at version `training`, and not in serving."""

    training: str
    types: frozenset[str]
    source: Source


# The oldest driver for each major version of CUDA: a driver runs every minor version of it ("minor version
# compatibility"). Code that is compiled at run time from newer PTX is the exception.
_COMPATIBILITY = Source("https://docs.nvidia.com/deploy/cuda-compatibility/", date(2026, 11, 22))
CUDA_DRIVERS = {12: Driver(525, _COMPATIBILITY), 13: Driver(580, _COMPATIBILITY)}

# PyTorch's release/2.13 builds cu129 for x86-64 with these; vLLM's own kernels of CUDA 12.9 include them all
# (CUDA_ARCH_X86 of .buildkite/release-pipeline.yaml, v0.28.0).
_CU129 = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
_TORCH_2_13 = Source("https://github.com/pytorch/pytorch/pull/188443", date(2026, 6, 29))
_VLLM = Source("https://hub.docker.com/r/vllm/vllm-openai/tags", date(2026, 11, 22))
_LOCK = Source("https://pypi.org", date(2026, 11, 22))

IMAGES = {
    image.role: image
    for image in (
        Image("train_trl", "torch==2.13.0+cu129", _TORCH_2_13, (12, 9), _CU129),
        Image("serve_vllm", "vllm/vllm-openai:v0.29.0-cu129", _VLLM, (12, 9), _CU129),
        Image("train_maxtext", "torch==2.13.0+cpu", _LOCK),
        Image("train_ray", "torch==2.13.0+cpu", _LOCK),
        Image("serve_vllm_tpu", "torch==2.10.0+cpu", _LOCK),
    )
}


# Training's transformers has these types, and 5.17.0 has not. That version came with vLLM 0.31, while the image has
# vLLM 0.29. Whether vLLM 0.29 has classes of its own for some of them could not be read.
UNSERVED = UnservedTypes(
    training="5.23.0",
    types=frozenset(
        (
            *("bailing_hybrid", "beam", "dots3_note", "dots3_note_text", "flint", "granite_docling", "inkling2"),
            *("inkling2_text", "hyperclovax_vision_v2", "iquestcoder", "kolibri1", "lfm3", "lfm3_vl", "minicpm_ocr"),
            *("minicpmv4_7", "mistral_large4", "moss_transcribe_diarize", "muse_spark", "nemotron_h_omni"),
            "unlimited_ocr",
        )
    ),
    source=Source("https://pypi.org/project/transformers/5.17.0/", date(2026, 11, 23)),
)


def unserved_model(job: JobSpec, model_type: str) -> str:
    """Why no endpoint can serve a model of a type, which training would find out too late; "" if one may."""
    if job.serve is None or job.serve.type not in ("cloud_run", "gke") or model_type not in UNSERVED.types:
        return ""
    return f"image serve_vllm ({IMAGES['serve_vllm'].pin}) does not know models of type {model_type!r}"


def gpu_problems(role: str, accelerator: str, drivers: Mapping[str, Driver], pointer: str) -> Iterator[SpecProblem]:
    """The problem, at `pointer`, that an image does not start on an accelerator; none if it does.

    `drivers` are the platform's, by accelerator.
    """
    image, gpu, driver = IMAGES[role], GPUS[accelerator], drivers[accelerator]
    if image.starts_on(gpu, driver):
        return
    able = [name for name in drivers if image.starts_on(GPUS[name], drivers[name])]
    mend = f"{'one of ' + ', '.join(able) if able else 'another platform'}, or another base in containers/{role}"
    yield SpecProblem(pointer, f"image {role} does not start there: {_reason(image, gpu, driver)}", accelerator, mend)


def attention_problems(role: str, job: JobSpec) -> Iterator[SpecProblem]:
    """The problem that the spec names a flash attention that the image does not have; none if it has it."""
    wanted = job.model.attn_implementation
    if wanted.startswith("flash_attention") and wanted not in IMAGES[role].attention:
        mend = f"'auto', 'sdpa' or 'eager', or an image with the package: add it in containers/{role} and in IMAGES"
        yield SpecProblem("/model/attn_implementation", f"image {role} does not have it", wanted, mend)


def _reason(image: Image, gpu: Gpu, driver: Driver) -> str:
    if image.cuda is None:
        return "it is an image for TPUs"
    cuda = ".".join(map(str, image.cuda))
    if image.cuda[0] > driver.newest_cuda:
        return (
            f"its CUDA {cuda} ({image.pin}) is too new for driver {driver.branch}, which runs CUDA {driver.newest_cuda}"
        )
    if driver.branch < gpu.least_driver:
        return f"driver {driver.branch} is older than {gpu.least_driver}, which the GPU needs"
    built = ", ".join(f"sm_{major}{minor}" for major, minor in image.architectures)
    return f"{image.pin} has kernels for {built}, and the GPU is sm_{gpu.capability[0]}{gpu.capability[1]}"
