// One instruction-set level: this file is compiled once per level, under that level's compiler flags, with
// OCTAVO_LEVEL naming its namespace, OCTAVO_SIMD its vector header and OCTAVO_TABLE the table it fills.
#include "kernels.h"
#include "level/attend.h"
#include "level/bounds.h"
#include "level/compressed.h"
#include "level/gemm.h"
#include "level/interleave.h"
#include "level/quant.h"
#include "level/rope.h"
#include "level/rowwise.h"
#include "level/vocab.h"
#ifdef OCTAVO_TILES
#include "level/tile_gemm.h"
#include "level/tile_quant.h"
#endif

namespace octavo::OCTAVO_LEVEL {

static_assert(kGemmRows <= kMostInterleavedRows);

// In the order of WeightFormat.
#define OCTAVO_QUANTISED(kernel)                                                                                    \
    kernel<WeightFormat::q4_0>, kernel<WeightFormat::q4_1>, kernel<WeightFormat::q5_0>, kernel<WeightFormat::q5_1>, \
        kernel<WeightFormat::q8_0>, kernel<WeightFormat::q2_k>, kernel<WeightFormat::q3_k>,                         \
        kernel<WeightFormat::q4_k>, kernel<WeightFormat::q5_k>, kernel<WeightFormat::q6_k>,                         \
        kernel<WeightFormat::iq4_nl>, kernel<WeightFormat::iq4_xs>, kernel<WeightFormat::mxfp4>
// In the order of NormKind.
#define OCTAVO_NORMS(x, others)                                                        \
    {normalise<x, others, kRmsNorm>, normalise<x, others, kRmsNormRoundedOnce>,        \
     normalise<x, others, kLayerNorm>, normalise<x, others, kNoNorm>}
// In the order of Activation.
#define OCTAVO_GATES(kernel, storage)                                                                    \
    kernel<storage, kSilu>, kernel<storage, kGeluTanh>, kernel<storage, kGelu>, kernel<storage, kRelu>, \
        kernel<storage, kRelu2>

constexpr Kernels kTable = {
    .name = OCTAVO_NAME,
    .attend = attend,
    .merge = merge,
    .rope_write = {rope_write<kBf16>, rope_write<kF32>},
    .bound_keys = {bound_keys<kBf16>, bound_keys<kF32>},
    .score_bounds = {score_bounds<kBf16>, score_bounds<kF32>},
    .normalise = {{OCTAVO_NORMS(kBf16, kBf16), {}}, {OCTAVO_NORMS(kF32, kBf16), OCTAVO_NORMS(kF32, kF32)}},
    .gated = {{OCTAVO_GATES(gated, kBf16)}, {OCTAVO_GATES(gated, kF32)}},
    .activate = {{OCTAVO_GATES(activate, kBf16), activate<kBf16, kXielu>},
                 {OCTAVO_GATES(activate, kF32), activate<kF32, kXielu>}},
    .add = {{add<kBf16, kBf16>, nullptr}, {add<kF32, kBf16>, add<kF32, kF32>}},
    .scale = {scale<kBf16>, scale<kF32>},
    .weighted_sum = {weighted_sum<kBf16>, weighted_sum<kF32>},
    .softcap = softcap,
    .argmax = {argmax<kBf16>, argmax<kF32>},
    .block_maxima = block_maxima,
    .vocab_masses = vocab_masses,
    .count_above = count_above,
    .mass_from = mass_from,
    .list_between = list_between,
    .quantise_rows = {quantise_rows<kBf16>, quantise_rows<kF32>},
    .quant_rows = kQuantRows,
    .gemm_rows = kGemmRows,
#ifdef OCTAVO_TILES
    .multiply = {nullptr, gemm<kF32>, nullptr, OCTAVO_QUANTISED(quant_linear)},
    .pack_tile_rows = pack_tile_rows,
    .multiply_in_tiles = {multiply_in_tiles<StoredPanels>, nullptr, multiply_in_tiles<DecompressedPanels>,
                          OCTAVO_QUANTISED(multiply_quants_in_tiles)},
    .tile_units = kTileUnits,
    .gemm_quant_rows = kGemmQuantRows,
#else
    .multiply = {gemm<kBf16>, gemm<kF32>, gemm_compressed, OCTAVO_QUANTISED(quant_linear)},
#endif
};

}  // namespace octavo::OCTAVO_LEVEL

namespace octavo {

extern const Kernels OCTAVO_TABLE;
constinit const Kernels OCTAVO_TABLE = OCTAVO_LEVEL::kTable;

}  // namespace octavo
