"""What known issues of an engine point at: the layers that cure them, where those are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from diag.kernels.kernel import Kernel, Tensor
from diag.kernels.known import Build
from diag.pipeline.engine.builds import pointed_at
from diag.pipeline.prepare import Planned, plan_on
from diag.plan.schema import plan_for_format
from fixtures.graphs import GRAPHS

PLAIN = Kernel("/q/MatMul+/k/MatMul+/v/MatMul_myl0_3", "gemm", ("n",), (), (Tensor("y", (8, 8), "fp16"),))
MERGED = replace(PLAIN, tactic="sm90_xmma_gemm_i8i8_i8i32_f32_tn_n")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    path = Path(tmp_path_factory.mktemp("pointed") / "model.onnx")
    onnx.save(GRAPHS["bert"]().model, path)
    return plan_on(str(path), plan_for_format("int8"))


def test_merged_projections_point_at_the_product_of_queries_and_keys(planned: Planned) -> None:
    named = pointed_at(Build("10.6.0", "9.0", [MERGED]), planned)
    products = {n for n, role in planned.roles.items() if role.name == "qk_matmul"}
    assert set(named) == products
    blocks = {role.block for role in planned.roles.values()} - {None}
    assert len(named) == len(blocks)


@pytest.mark.parametrize(
    "build",
    [Build("10.6.0", "9.0", [PLAIN]), Build("10.9.0", "9.0", [MERGED]), Build("10.6.0", "8.9", [MERGED])],
)
def test_other_kernels_versions_and_gpus_point_at_nothing(planned: Planned, build: Build) -> None:
    assert pointed_at(build, planned) == ()
