"""Triton's interpreter, in which kernels run where there is no GPU."""

from functools import cache
from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter


@cache
def prepare_once_a_kernel() -> None:
    """The interpreter replaces the functions of Triton's language at each call of a function within
    a kernel, a quarter of the time; once for each module that a kernel calls is enough.
    """
    replace_functions = interpreter._patch_lang
    done: set[int] = set()

    def replace_once(function: FunctionType) -> interpreter._LangPatchScope:
        if tl.core.is_builtin(tl.load):  # a kernel begins
            done.clear()
        names = id(function.__globals__)
        if names in done:
            return interpreter._LangPatchScope()
        done.add(names)
        return replace_functions(function)

    interpreter._patch_lang = replace_once
