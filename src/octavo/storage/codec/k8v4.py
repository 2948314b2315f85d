"""k8v4: keys as int8, values as int4.

An error in a key moves every weight of a softmax, one in a value is averaged with the others': keys get the bits
(KIVI, Liu et al. 2024; KVTuner, Li et al. 2025). Layouts and fields are those of the two.

Read by the C++ kernels (`csrc/level/coded_attention.h`) and the reference.
"""

from octavo.storage.codec.int4 import INT4_VALUES
from octavo.storage.codec.int8 import INT8

K8V4 = (INT8, INT4_VALUES)
