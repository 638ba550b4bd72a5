"""The one thing that pyproject.toml can't say: the extension may fail, and is abi3 where that exists."""

import sysconfig

from setuptools import Extension, setup

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # these interpreters have no limited API yet
LIMITED_API = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]

setup(
    ext_modules=[
        Extension(
            "imgsum.hash._lanes",
            ["imgsum/hash/lanes.c"],
            define_macros=LIMITED_API,
            extra_compile_args=["-O3", "-std=gnu11"],
            py_limited_api=not FREE_THREADED,
            optional=True,  # without a compiler, or with one that fails, hashlib is used
        )
    ],
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
