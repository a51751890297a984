"""Classes of libraries that take seconds to import, and that a script may not use."""

import sys


def loaded_class(module: str, name: str) -> tuple[type, ...]:
    """Return a class, alone in a tuple, or an empty tuple as long as its module is not imported.

    For `isinstance`, since an object can only be of a class whose module is imported. This imports
    nothing: within a window, a module would keep the functions of torch that are replaced there.

    Args:
        module: The module that defines the class.
        name: The name of the class.

    >>> isinstance(1, loaded_class("fractions", "Fraction"))
    False
    """
    # Another thread may be importing the module: then the class does not exist yet.
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
