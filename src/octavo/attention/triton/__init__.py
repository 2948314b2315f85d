"""Triton kernels for NVIDIA GPUs: attention over block tables, and storing keys and values.

Importing a module of this package imports triton, so this happens only if the device is a GPU or the backend is
requested by name. If TRITON_INTERPRET=1 is set in the environment before that, Triton's interpreter runs the kernels on
a CPU, slowly, as the tests do.
"""
