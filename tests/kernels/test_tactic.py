"""Tactic names as engines of several versions bear them."""

from __future__ import annotations

import pytest

from diag.kernels.tactic import accumulator_of, math_type_of, multiplies


@pytest.mark.parametrize(
    ("tactic", "math", "accumulator"),
    [
        ("sm90_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize128x64x32_cgasize1x2x1", "fp16", "fp16"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_nt_n_tilesize32x32x64", "fp16", "fp32"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32", "tf32", "fp32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8", "fp32", "fp32"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_nn_n", "bf16", "fp32"),
        ("sm90_xmma_gemm_i8f32_i8i32_f32_tn_n_tilesize64x64x128", "int8", "int32"),
        ("sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize64x64x64_tensor16x8x32_gelu_erf", "int8", "int32"),
        ("sm90_xmma_gemm_e4m3f16_e4m3f32_f32_tn_n", "fp8", "fp32"),
        ("sm75_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32", "int8", "int32"),
        ("ampere_h16816gemm_128x64_ldg8_stages_32x6_tn_v1", "fp16", "fp16"),
        ("ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_nn", "fp16", "fp32"),
        ("cutlass_80_tensorop_s1688tf32gemm_64x64_16x6_nn_align4", "tf32", "fp32"),
        ("turing_fp16_i8816cudnn_int8_128x128_ldg16_relu_small_nt_v1", "int8", "int32"),
        ("volta_h884cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1", "fp16", "fp16"),
        ("volta_int8x4_icudnn_int8x4_128x32_relu_xregs_medium_c32_nn_v1", "int8", "int32"),
        ("volta_scudnn_128x32_relu_small_nn_v1", "fp32", "fp32"),
        ("ampere_sgemm_128x64_nn", "fp32", "fp32"),
        ("_gemm_mha_v2_0xe03851b430850c9aa238cd814f286a90", "", ""),
        ("__myelin_CASK_STUB", "", ""),
        ("__myl_CasSum_0xa60f1ab654042a00b9a2f9399c629141", "", ""),
        ("", "", ""),
    ],
)
def test_what_a_tactic_tells(tactic: str, math: str, accumulator: str) -> None:
    assert (math_type_of(tactic), accumulator_of(tactic)) == (math, accumulator)


@pytest.mark.parametrize(
    ("layer_type", "name", "tactic", "expected"),
    [
        ("gemm", "a", "", True),
        ("correlation", "/conv/Conv_myl0_3", "__myelin_CASK_STUB", True),
        ("CudaDepthwiseConvolution", "Conv_29", "", True),
        ("kgen", "_gemm_mha_v2_myl0_6", "_gemm_mha_v2_0xe0", True),
        ("runtime_fusion", "__myl_FcAddDivErfAddMulMul_myl1_15", "", True),
        ("runtime_fusion", "__myl_DecoMulAddRelu_myl0_210", "", True),
        ("kgen", "__myl_MoveReplConc_myl1_4", "__myl_MoveReplConc_0x60", False),
        ("kgen", "__myl_TraConSinCosRes_myl0_5", "__myl_TraConSinCosRes_0x4f", False),
        ("Reformat", "Reformatting CopyNode for Input Tensor 0 to Conv_3", "", False),
        ("shape_call", "dummy_shape_call__mye34862_0_myl0_0", "", False),
    ],
)
def test_what_multiplies(layer_type: str, name: str, tactic: str, expected: bool) -> None:
    assert multiplies(layer_type, name, tactic) is expected
