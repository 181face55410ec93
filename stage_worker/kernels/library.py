"""The compiled kernels with their signatures. Pointers are those of contiguous tensors."""

from __future__ import annotations

import ctypes

from stage_worker.kernels.build import load_library

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_SIGNATURES: dict[str, list[type]] = {
    "stagemesh_prompt_attention": [
        *(_POINTER, *[_SIZE] * 6, _POINTER, _POINTER, _SIZE, _POINTER),
        *(ctypes.c_float, _POINTER, ctypes.c_int),
    ],
    "stagemesh_linear": [
        *(_POINTER, _SIZE, _SIZE, ctypes.c_int, _POINTER, _SIZE),
        *(_POINTER, _POINTER, ctypes.c_int),
    ],
    "stagemesh_find_codes": [_POINTER, _SIZE, _SIZE, _POINTER],
    "stagemesh_expand_codes": [_POINTER, _SIZE, _SIZE, _POINTER],
    "stagemesh_silu_mul": [_POINTER, _SIZE, _SIZE, _POINTER],
    "stagemesh_rms_norm": [_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_float, _POINTER],
    "stagemesh_rotate_and_store": [_POINTER, *[_SIZE] * 4, *[_POINTER] * 5],
    "stagemesh_decode_attention": [
        *(_POINTER, _SIZE, _POINTER, *[_SIZE] * 4, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _SIZE, _POINTER, ctypes.c_float, _POINTER, ctypes.c_int),
    ],
    "stagemesh_room_for_a_row": [_POINTER],
    "stagemesh_blocks": [_POINTER, _POINTER, _SIZE, *[_POINTER] * 3, ctypes.c_int],
}


class Library:
    """The shared library with its signatures and sizes."""

    def __init__(self) -> None:
        """Raises `KernelsUnavailable`."""
        library = load_library()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.stagemesh_prompt_attention.restype = ctypes.c_int
        library.stagemesh_find_codes.restype = ctypes.c_int
        library.stagemesh_room_for_a_row.restype = _SIZE
        library.stagemesh_blocks.restype = ctypes.c_int
        library.stagemesh_panel_bytes.argtypes = [ctypes.c_int, _SIZE]
        for name in ("panel", "panel_bytes", "code_block", "lanes", "max_group", "max_dim"):
            getattr(library, f"stagemesh_{name}").restype = _SIZE
        self.linear = library.stagemesh_linear
        self.find_codes = library.stagemesh_find_codes
        """Returns 0, or -1 where a weight has none."""
        self.expand_codes = library.stagemesh_expand_codes
        self.panel_bytes = library.stagemesh_panel_bytes
        self.silu_mul = library.stagemesh_silu_mul
        self.rms_norm = library.stagemesh_rms_norm
        self.rotate_and_store = library.stagemesh_rotate_and_store
        self.decode_attention = library.stagemesh_decode_attention
        self.prompt_attention = library.stagemesh_prompt_attention
        """Returns 0, or -1 where there is no memory for its tiles."""
        self.room_for_a_row = library.stagemesh_room_for_a_row
        """Floats between the kernels of a block."""
        self.blocks = library.stagemesh_blocks
        """Returns 0, or -1 where there is no memory for the attention of a prompt."""
        self.panel: int = library.stagemesh_panel()
        """Output features that lie together in a packed weight."""
        self.code_block: int = library.stagemesh_code_block()
        """Input features that share a scale where a weight is kept as codes."""
        self.lanes: int = library.stagemesh_lanes()
        self.max_group: int = library.stagemesh_max_group()
        """Most query heads of one KV head."""
        self.max_dim: int = library.stagemesh_max_dim()
        """Largest head."""
