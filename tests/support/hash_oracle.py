"""The hash of order and masks, written again in plain Python integers."""

# bound of all statistics: standard deviations of what independent draws give; seeds are fixed
SIGMAS = 4.0


def splitmix64(state: int) -> int:
    """One output of splitmix64 as Vigna's public-domain splitmix64.c writes it."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def oracle_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part % 2**64))
    return key
