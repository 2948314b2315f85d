"""Triton kernels for NVIDIA GPUs: attention over block tables, and storing keys and values.

Only importing a module of this package imports triton, which nothing does unless the device is a GPU or the backend is
asked for by name. With TRITON_INTERPRET=1 in the environment before that, Triton's interpreter runs the kernels on a
CPU, slowly: so the tests do.
"""
