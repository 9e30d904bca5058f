"""The training methods: their names are the spec's, and every module has the functions of the protocol."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from containers.common.errors import BAD_CONFIG, JobError
from containers.train_maxtext import methods as maxtext_methods
from containers.train_trl.methods import METHODS, Method, load_method
from dropforge.spec import JobSpec, registry


def test_each_method_of_the_spec_is_in_an_image() -> None:
    training = JobSpec.model_fields["training"].annotation
    assert training is not None
    declared = get_args(training.model_fields["method"].annotation)
    assert {*METHODS, *maxtext_methods.METHODS} == set(declared)


def test_a_target_takes_no_method_that_its_image_lacks() -> None:
    images = {"cloud_run": METHODS, "gke": METHODS, "tpu_vm": maxtext_methods.METHODS, "ray": maxtext_methods.METHODS}
    for target in registry.classes("target"):
        assert set(target.methods) <= set(images[target.type_name()]), target.type_name()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_functions_of_the_protocol(name: str) -> None:
    functions = {key: value for key, value in vars(Method).items() if inspect.isfunction(value) and key[0] != "_"}
    assert set(functions) == {"read_examples", "build_trainer", "evaluate", "metrics", "describe"}
    for key, function in functions.items():
        expected = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        assert list(inspect.signature(getattr(load_method(name), key)).parameters) == expected, key


def test_an_unknown_method_is_refused_with_the_known_methods() -> None:
    with pytest.raises(JobError, match=r"training\.method is 'dpo'; expected one of sft") as caught:
        load_method("dpo")
    assert caught.value.exit_code == BAD_CONFIG
