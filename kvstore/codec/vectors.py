"""Vectors of eight for the kernels: numba compiles loops over arrays well only when it can see that they do not overlap, which it seldom
can; with these a kernel says itself what stays in registers.

An F8 is eight float32, an I8 eight int32, an H16 sixteen int16. Each function is one LLVM instruction or a few on portable vector types,
so every target that numba knows compiles them, and floats keep to IEEE 754 in the order written (no contraction). Loads and
stores address a 1-D array at an element index and check nothing.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False, ignore-errors=True

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_I1, _I8, _I16, _I32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_FLOAT = ir.FloatType()
_F8_IR = ir.VectorType(_FLOAT, 8)
_I8_IR = ir.VectorType(_I32, 8)
_H16_IR = ir.VectorType(_I16, 16)


class _Vector(types.Type):
    def __init__(self, name, form):
        super().__init__(name=name)
        self.form = form


F8, I8, H16 = _Vector("F8", _F8_IR), _Vector("I8", _I8_IR), _Vector("H16", _H16_IR)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.form)


def _pointer(context, builder, array_type, array, index, form):
    """To a vector of `form` at an element of a 1-D array."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), form.as_pointer())


def _align(array_type):
    return max(array_type.dtype.bitwidth // 8, 1)


def _load(form, result, convert):
    """An intrinsic (array, index) -> result that loads `form` and converts it."""

    @intrinsic
    def load(typingctx, array, index):
        def generate(context, builder, signature, arguments):
            array_type = signature.args[0]
            loaded = builder.load(_pointer(context, builder, array_type, *arguments, form))
            loaded.align = _align(array_type)
            return convert(builder, loaded)

        return result(array, types.intp), generate

    return load


def _store(form, convert):
    """An intrinsic (array, index, vector) that converts the vector to `form` and stores it."""

    @intrinsic
    def store(typingctx, array, index, vector):
        def generate(context, builder, signature, arguments):
            array_type = signature.args[0]
            stored = builder.store(convert(builder, arguments[2]), _pointer(context, builder, array_type, arguments[0], arguments[1], form))
            stored.align = _align(array_type)
            return context.get_dummy_value()

        return types.none(array, types.intp, vector), generate

    return store


def _constant(form, number):
    return ir.Constant(form, [number] * form.count)


def _splat(builder, form, scalar):
    empty = ir.Constant(form, ir.Undefined)
    first = builder.insert_element(empty, scalar, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_I32, form.count), [0] * form.count))


def _operation(result, build):
    """An intrinsic of one or two vectors, given as a function of the builder and them."""

    def one(typingctx, a):
        return result(a), lambda context, builder, signature, arguments: build(builder, *arguments)

    def two(typingctx, a, b):
        return result(a, b), lambda context, builder, signature, arguments: build(builder, *arguments)

    return intrinsic(one if build.__code__.co_argcount == 2 else two)


def _narrow_bytes(count):
    return ir.VectorType(_I8, count)


load_f32 = _load(_F8_IR, F8, lambda builder, v: v)
load_bf16 = _load(
    ir.VectorType(_I16, 8),
    F8,
    lambda builder, v: builder.bitcast(builder.shl(builder.zext(v, _I8_IR), _constant(_I8_IR, 16)), _F8_IR),
)
load_u16 = _load(ir.VectorType(_I16, 8), I8, lambda builder, v: builder.zext(v, _I8_IR))
load_u8 = _load(_narrow_bytes(8), I8, lambda builder, v: builder.zext(v, _I8_IR))
load_i8 = _load(_narrow_bytes(8), I8, lambda builder, v: builder.sext(v, _I8_IR))
load_i32 = _load(_I8_IR, I8, lambda builder, v: v)
load_u8x16 = _load(_narrow_bytes(16), H16, lambda builder, v: builder.zext(v, _H16_IR))
load_i16x16 = _load(_H16_IR, H16, lambda builder, v: v)

store_f32 = _store(_F8_IR, lambda builder, v: v)
store_u16 = _store(ir.VectorType(_I16, 8), lambda builder, v: builder.trunc(v, ir.VectorType(_I16, 8)))
store_u8 = _store(_narrow_bytes(8), lambda builder, v: builder.trunc(v, _narrow_bytes(8)))
store_u16x16 = _store(_H16_IR, lambda builder, v: v)
store_u8x16 = _store(_narrow_bytes(16), lambda builder, v: builder.trunc(v, _narrow_bytes(16)))
store_i32 = _store(_I8_IR, lambda builder, v: v)

add = _operation(F8, lambda builder, a, b: builder.fadd(a, b))
subtract = _operation(F8, lambda builder, a, b: builder.fsub(a, b))
multiply = _operation(F8, lambda builder, a, b: builder.fmul(a, b))
divide = _operation(F8, lambda builder, a, b: builder.fdiv(a, b))
smaller = _operation(F8, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
larger = _operation(F8, lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
bits_of = _operation(I8, lambda builder, a: builder.bitcast(a, _I8_IR))
float_of = _operation(F8, lambda builder, a: builder.bitcast(a, _F8_IR))
to_int = _operation(I8, lambda builder, a: builder.fptosi(a, _I8_IR))
to_float = _operation(F8, lambda builder, a: builder.sitofp(a, _F8_IR))

i_add = _operation(I8, lambda builder, a, b: builder.add(a, b))
i_subtract = _operation(I8, lambda builder, a, b: builder.sub(a, b))
i_multiply = _operation(I8, lambda builder, a, b: builder.mul(a, b))
i_and = _operation(I8, lambda builder, a, b: builder.and_(a, b))
i_or = _operation(I8, lambda builder, a, b: builder.or_(a, b))
i_smaller = _operation(I8, lambda builder, a, b: builder.select(builder.icmp_signed("<", a, b), a, b))
i_larger = _operation(I8, lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b))
below = _operation(I8, lambda builder, a, b: builder.sext(builder.icmp_signed("<", a, b), _I8_IR))
"""Lanes of -1 where a < b, else 0."""

h_and = _operation(H16, lambda builder, a, b: builder.and_(a, b))
h_or = _operation(H16, lambda builder, a, b: builder.or_(a, b))

h_larger = _operation(H16, lambda builder, a, b: builder.select(builder.icmp_signed(">", a, b), a, b))

EVEN = ir.Constant(ir.VectorType(_I32, 8), list(range(0, 16, 2)))
ODD = ir.Constant(ir.VectorType(_I32, 8), list(range(1, 16, 2)))


def _dot_pairs(builder, a, b):
    wide = ir.VectorType(_I32, 16)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    nothing = ir.Constant(wide, ir.Undefined)
    return builder.add(builder.shuffle_vector(products, nothing, EVEN), builder.shuffle_vector(products, nothing, ODD))


dot_pairs = _operation(I8, _dot_pairs)
"""Of two H16: lane i is a[2i] * b[2i] + a[2i + 1] * b[2i + 1]; x86 has one instruction for it."""


@intrinsic
def splat(typingctx, value):
    """F8 of one float32."""
    return F8(types.float32), lambda context, builder, signature, arguments: _splat(builder, _F8_IR, arguments[0])


@intrinsic
def i_splat(typingctx, value):
    """I8 of one int32."""
    return I8(types.int32), lambda context, builder, signature, arguments: _splat(builder, _I8_IR, arguments[0])


@intrinsic
def h_splat(typingctx, value):
    """H16 of one int16."""
    return H16(types.int16), lambda context, builder, signature, arguments: _splat(builder, _H16_IR, arguments[0])


@intrinsic
def load_pairs(typingctx, array, index):
    """H16 of one int32 of an array, eight times: its low half and its high half by turns."""

    def generate(context, builder, signature, arguments):
        loaded = builder.load(_pointer(context, builder, signature.args[0], *arguments, _I32))
        loaded.align = _align(signature.args[0])
        return builder.bitcast(_splat(builder, _I8_IR, loaded), _H16_IR)

    return H16(array, types.intp), generate


@intrinsic
def lane(typingctx, vector, index):
    """Lane `index` of an F8."""

    def generate(context, builder, signature, arguments):
        return builder.extract_element(arguments[0], builder.trunc(arguments[1], _I32))

    return types.float32(vector, types.intp), generate


def _shift(name, result, form, scalar):
    @intrinsic
    def shift(typingctx, vector, by):
        def generate(context, builder, signature, arguments):
            amount = _splat(builder, form, builder.trunc(arguments[1], scalar))
            return getattr(builder, name)(arguments[0], amount)

        return result(vector, types.intp), generate

    return shift


shifted_left, shifted_right = _shift("shl", I8, _I8_IR, _I32), _shift("lshr", I8, _I8_IR, _I32)
h_shifted_left, h_shifted_right = _shift("shl", H16, _H16_IR, _I16), _shift("lshr", H16, _H16_IR, _I16)


def _folded(name):
    """Of an F8: the smallest, or largest, of its lanes as float32."""

    @intrinsic
    def fold(typingctx, vector):
        def generate(context, builder, signature, arguments):
            v = arguments[0]
            for width in (4, 2, 1):
                form = ir.VectorType(_FLOAT, 2 * width)
                nothing = ir.Constant(form, ir.Undefined)
                low = builder.shuffle_vector(v, nothing, ir.Constant(ir.VectorType(_I32, width), list(range(width))))
                high = builder.shuffle_vector(v, nothing, ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width))))
                v = builder.select(builder.fcmp_ordered(name, low, high), low, high)
            return builder.extract_element(v, _I32(0))

        return types.float32(vector), generate

    return fold


smallest_lane, largest_lane = _folded("<"), _folded(">")
