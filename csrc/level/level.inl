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

namespace octavo {

static_assert(OCTAVO_LEVEL::kGemmRows <= OCTAVO_LEVEL::kMostInterleavedRows);

// In the order of WeightFormat.
#define OCTAVO_QUANTISED(kernel)                                                                                    \
    kernel<WeightFormat::q4_0>, kernel<WeightFormat::q4_1>, kernel<WeightFormat::q5_0>, kernel<WeightFormat::q5_1>, \
        kernel<WeightFormat::q8_0>, kernel<WeightFormat::q2_k>, kernel<WeightFormat::q3_k>,                         \
        kernel<WeightFormat::q4_k>, kernel<WeightFormat::q5_k>, kernel<WeightFormat::q6_k>, \
        kernel<WeightFormat::iq4_nl>, kernel<WeightFormat::iq4_xs>, kernel<WeightFormat::mxfp4>
// In the order of NormKind.
#define OCTAVO_NORMS(x, others)                                                                              \
    {OCTAVO_LEVEL::normalise<x, others, kRmsNorm>, OCTAVO_LEVEL::normalise<x, others, kRmsNormRoundedOnce>, \
     OCTAVO_LEVEL::normalise<x, others, kLayerNorm>, OCTAVO_LEVEL::normalise<x, others, kNoNorm>}

extern const Kernels OCTAVO_TABLE;
const Kernels OCTAVO_TABLE = {
    .name = OCTAVO_NAME,
    .attend = OCTAVO_LEVEL::attend,
    .merge = OCTAVO_LEVEL::merge,
    .rope_write = {OCTAVO_LEVEL::rope_write<kBf16>, OCTAVO_LEVEL::rope_write<kF32>},
    .bound_keys = {OCTAVO_LEVEL::bound_keys<kBf16>, OCTAVO_LEVEL::bound_keys<kF32>},
    .score_bounds = {OCTAVO_LEVEL::score_bounds<kBf16>, OCTAVO_LEVEL::score_bounds<kF32>},
    .normalise = {{OCTAVO_NORMS(kBf16, kBf16), {}}, {OCTAVO_NORMS(kF32, kBf16), OCTAVO_NORMS(kF32, kF32)}},
    .gated = {{OCTAVO_LEVEL::gated<kBf16, kSilu>, OCTAVO_LEVEL::gated<kBf16, kGeluTanh>,
               OCTAVO_LEVEL::gated<kBf16, kGelu>, OCTAVO_LEVEL::gated<kBf16, kRelu>,
               OCTAVO_LEVEL::gated<kBf16, kRelu2>},
              {OCTAVO_LEVEL::gated<kF32, kSilu>, OCTAVO_LEVEL::gated<kF32, kGeluTanh>,
               OCTAVO_LEVEL::gated<kF32, kGelu>, OCTAVO_LEVEL::gated<kF32, kRelu>,
               OCTAVO_LEVEL::gated<kF32, kRelu2>}},
    .activate = {{OCTAVO_LEVEL::activate<kBf16, kSilu>, OCTAVO_LEVEL::activate<kBf16, kGeluTanh>,
                  OCTAVO_LEVEL::activate<kBf16, kGelu>, OCTAVO_LEVEL::activate<kBf16, kRelu>,
                  OCTAVO_LEVEL::activate<kBf16, kRelu2>},
                 {OCTAVO_LEVEL::activate<kF32, kSilu>, OCTAVO_LEVEL::activate<kF32, kGeluTanh>,
                  OCTAVO_LEVEL::activate<kF32, kGelu>, OCTAVO_LEVEL::activate<kF32, kRelu>,
                  OCTAVO_LEVEL::activate<kF32, kRelu2>}},
    .add = {{OCTAVO_LEVEL::add<kBf16, kBf16>, nullptr},
            {OCTAVO_LEVEL::add<kF32, kBf16>, OCTAVO_LEVEL::add<kF32, kF32>}},
    .scale = {OCTAVO_LEVEL::scale<kBf16>, OCTAVO_LEVEL::scale<kF32>},
    .weighted_sum = {OCTAVO_LEVEL::weighted_sum<kBf16>, OCTAVO_LEVEL::weighted_sum<kF32>},
    .softcap = OCTAVO_LEVEL::softcap,
    .argmax = {OCTAVO_LEVEL::argmax<kBf16>, OCTAVO_LEVEL::argmax<kF32>},
    .block_maxima = OCTAVO_LEVEL::block_maxima,
    .vocab_masses = OCTAVO_LEVEL::vocab_masses,
    .count_above = OCTAVO_LEVEL::count_above,
    .mass_from = OCTAVO_LEVEL::mass_from,
    .list_between = OCTAVO_LEVEL::list_between,
    .quantise_rows = {OCTAVO_LEVEL::quantise_rows<kBf16>, OCTAVO_LEVEL::quantise_rows<kF32>},
#ifdef OCTAVO_TILES
    .multiply = {nullptr, OCTAVO_LEVEL::gemm<kF32>, nullptr,
                 OCTAVO_QUANTISED(OCTAVO_LEVEL::quant_linear)},
    .quant_rows = OCTAVO_LEVEL::kQuantRows,
    .gemm_rows = {OCTAVO_LEVEL::kGemmRows, OCTAVO_LEVEL::kGemmRows},
    .pack_tile_rows = OCTAVO_LEVEL::pack_tile_rows,
    .multiply_in_tiles = OCTAVO_TILE_PRODUCTS,
    .tile_units = OCTAVO_LEVEL::kTileUnits,
    .gemm_quant_rows = OCTAVO_LEVEL::kGemmQuantRows,
#else
    .multiply = {OCTAVO_LEVEL::gemm<kBf16>, OCTAVO_LEVEL::gemm<kF32>, OCTAVO_LEVEL::gemm_compressed,
                 OCTAVO_QUANTISED(OCTAVO_LEVEL::quant_linear)},
    .quant_rows = OCTAVO_LEVEL::kQuantRows,
    .gemm_rows = {OCTAVO_LEVEL::kGemmRows, OCTAVO_LEVEL::kGemmRows},
    .pack_tile_rows = nullptr,
    .multiply_in_tiles = {},
    .tile_units = 1,
    .gemm_quant_rows = 0,
#endif
};

}  // namespace octavo
