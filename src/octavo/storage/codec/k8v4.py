"""k8v4: keys as int8, values as int4.

Keys get more bits, because an error in a key changes every weight of a softmax, whereas errors in values are averaged
(KIVI, Liu et al. 2024; KVTuner, Li et al. 2025). Layouts and fields are those of int8 and int4.

Read by the C++ kernels (`csrc/level/coded_attention.h`), the Triton kernels and the reference.
"""

from octavo.storage.codec.int4 import INT4_VALUES
from octavo.storage.codec.int8 import INT8

K8V4 = (INT8, INT4_VALUES)
