#pragma once

namespace octavo {

enum Storage { kBf16, kF32, kNumStorages };  // what tensors hold; arithmetic is in float32

}  // namespace octavo
