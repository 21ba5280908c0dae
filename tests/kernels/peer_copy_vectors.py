"""The command: `python -m tests.kernels.peer_copy_vectors`, without TRITON_INTERPRET; needs no GPU.

Compiles the kernel that stores rows and the meeting of the ranks for an H200; checks that the first moves whole words
of 16, 8, 4, 2 and 1 bytes a lane, and no lesser ones.
"""

from dlrm_overlap.kernels import flags, peer_copy
from tests.kernels.compiling import compile_for_h200

INSTRUCTIONS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "b16", 1: "b8"}
_TYPES: dict[str, str] = {"counted": "*i32", "counts": "*i32"}
_TYPES |= dict.fromkeys(("targets", "peers_ready", "clock", "ready", "status"), "*i64")
_TYPES |= dict.fromkeys(("source", "stride", "words", "offset", "timeout"), "i64")


def main() -> None:
    for word, instruction in INSTRUCTIONS.items():
        made = peer_copy._storing(4, word)
        text, constants = compile_for_h200(made, _TYPES)["ptx"], made.constants
        turns = constants["BLOCK"] // constants["VECTOR"] // (peer_copy._NUM_WARPS * 32)
        assert text.count(f"st.global.{instruction}") == turns + (word == 4), f"word {word}\n{text}"  # one sets a count
        assert text.count("st.global") == turns + 1, f"word {word}\n{text}"
    assert "atom" in compile_for_h200(flags._meeting(4), _TYPES)["ptx"]


if __name__ == "__main__":
    main()
