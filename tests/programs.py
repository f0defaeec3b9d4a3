"""The code generator of the programs that tests compile, and that of users."""

import importlib.metadata

# XLA's older generator for CPUs takes half the time to compile. Its option exists in these versions,
# and XLA ends at one that it doesn't know.
HAS_OLDER = importlib.metadata.version("jaxlib").startswith("0.10.")
# For `compile(compiler_options=AS_USERS)`, where a test reads the program or its memory.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if HAS_OLDER else {}
# For programs that run longer than they take to compile: as users' in speed, too.
OPTIMIZED = AS_USERS | {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
