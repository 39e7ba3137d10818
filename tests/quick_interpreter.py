"""Triton's interpreter, made quicker for tests: what it computes anew at each operation is computed
once. Values and errors stay its own: nothing here touches numbers."""

import functools
import inspect
from types import FunctionType, ModuleType

import numpy as np


def make_quick(interpreter: ModuleType) -> None:
    """`interpreter`: the module triton.runtime.interpreter. Calling it again does nothing."""
    if hasattr(interpreter, "is_quick"):
        return
    interpreter.is_quick = True
    _patch_language_once_a_launch(interpreter)
    _look_up_dtypes(interpreter)
    _share_shapes(interpreter.tl.core)
    _skip_what_changes_nothing(interpreter.interpreter_semantic)


def _patch_language_once_a_launch(interpreter: ModuleType) -> None:
    """A launch replaces the language's functions, and puts them back at its end. Each function that
    its kernel calls would look through all names again."""
    core = interpreter.tl.core
    members = functools.cache(lambda package: inspect.getmembers(package, core.is_builtin))

    def patch_builtin(package: object, builder: object, scope: object) -> None:
        for name, member in members(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    @functools.cache
    def languages_of(fn: FunctionType) -> frozenset[str]:
        seen = (each for each in fn.__globals__.values() if inspect.ismodule(each))
        return frozenset(each.__name__ for each in seen if each in (interpreter.tl, core))

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: list[set[str]] = []
    """By launch: none while no kernel runs."""

    def launch_kernel(self: object, *arguments: object, **named: object) -> object:
        patched.append(set())
        try:
            return launch(self, *arguments, **named)
        finally:
            patched.pop()

    def patch_lang(fn: FunctionType) -> object:
        languages = languages_of(fn)
        if patched:
            if languages <= patched[-1]:
                return None
            patched[-1].update(languages)
        return patch(fn)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = launch_kernel


def _look_up_dtypes(interpreter: ModuleType) -> None:
    """The original builds a table of eighteen types at each call."""
    block_type = interpreter.tl.core.block_type
    by_name: dict[str, np.dtype] = {}
    ask = interpreter._get_np_dtype

    def np_dtype_of(dtype: object) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, block_type) else dtype
        if scalar.name not in by_name:
            by_name[scalar.name] = ask(scalar)
        return by_name[scalar.name]

    interpreter._get_np_dtype = np_dtype_of


def _share_shapes(core: ModuleType) -> None:
    """Blocks of one shape share the objects that say so; nobody changes them."""
    constexpr, block_init = core.constexpr, core.block_type.__init__
    blocks: dict[tuple[object, ...], tuple[object, int]] = {}
    names: dict[tuple[object, str], str] = {}
    shapes: dict[tuple[int, ...], tuple[object, object]] = {}

    def init_block(self: object, element_ty: object, shape: object) -> None:
        key = tuple(each.value if isinstance(each, constexpr) else each for each in shape)
        if key not in blocks:
            block_init(self, element_ty, shape)  # and all that it refuses
            blocks[key] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = blocks[key]
        name = names.get((key, element_ty.name))
        if name is None:
            name = names[key, element_ty.name] = f"<{self.shape}, {element_ty}>"
        self.name = name

    tensor_init = core.tensor.__init__

    def init_tensor(self: object, handle: object, type: object) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            tensor_init(self, handle, type)
            shapes[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _skip_what_changes_nothing(semantic: object) -> None:
    """Overflows are looked for and not reported, unless the interpreter's options say debug. Most
    operands have a shape and type already, the same objects as the other's."""
    if not semantic.builder.options.debug:
        semantic.binary_op_sanitize_overflow_impl = lambda lhs, rhs, binary_op: None
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast

    def broadcast_to_each_other(lhs: object, rhs: object) -> object:
        shapes = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
        return (lhs, rhs) if shapes[0] is shapes[1] else broadcast(lhs, rhs)

    def cast_unless_same(
        input: object, dst_ty: object, fp_downcast_rounding: object = None
    ) -> object:
        return input if input.dtype is dst_ty else cast(input, dst_ty, fp_downcast_rounding)

    semantic.broadcast_impl_value = broadcast_to_each_other
    semantic.cast = cast_unless_same
