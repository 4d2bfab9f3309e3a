"""Bessel and Airy functions of each element.

Where JAX has none, the function is split into ranges; on each, a smooth part is a Chebyshev series.  The coefficients
below, which tests/bessel_tables.py computes, reach the precision of float64.
"""

from __future__ import annotations

import math
from typing import Any

from torchtpu.ops.registry import jnp, lax, pointwise

# fmt: off
J0 = (
    0.15772797147489012, -0.008723442352852221, 0.2651786132033368, -0.37009499387264977, 0.15806710233209725,
    -0.034893769411408884, 0.004819180069467605, -0.00046062616620627504, 3.246032882100508e-05,
    -1.7619469077621507e-06, 7.608163592418782e-08, -2.679253530557673e-09, 7.848696314479465e-11,
    -1.9438346867370164e-12, 4.125320595634374e-14, -7.588508125447546e-16, 1.2218515873961411e-17,
)
J1 = (
    0.08104484632565812, -0.1489751450676521, 0.1609992623572097, -0.08268049176681791, 0.022213639654966037,
    -0.003646940600769276, 0.0004050337728354822, -3.255554866857259e-05, 1.9858774049915165e-06,
    -9.521984756750436e-08, 3.687133759097148e-09, -1.178026622695885e-10, 3.160154580348003e-12,
    -7.221755239651773e-14, 1.4232144003513942e-15, -2.4441972916190464e-17,
)
Y0 = (
    -0.03314611320328494, -0.2744743055297453, 0.17903431407718265, 0.26156734625504663, -0.17730201278114358,
    0.04719668959576339, -0.007287962479552079, 0.0007531135932577742, -5.632079141056987e-05, 3.206532537654801e-06,
    -1.44072332740187e-07, 5.248794787330516e-09, -1.5837552541812015e-10, 4.02633081830612e-12, -8.747341203310769e-14,
    1.6434898714919468e-15, -2.6977881152566837e-17,
)
Y1 = (
    0.0025380132357417816, -0.01608717304766875, -0.09591204536083074, 0.08445197259652346, -0.028328123944594365,
    0.005289897544167113, -0.0006414551451326356, 5.505982873338744e-05, -3.53808001868935e-06, 1.7707804556154404e-07,
    -7.11055004989928e-09, 2.344337905911516e-10, -6.4651518414115946e-12, 1.51429151205002e-13,
    -3.0511859694473254e-15, 5.34668038572867e-17, -8.224911372021585e-19,
)
P0 = (
    0.9994603493475187, -0.0005365220468132117, 3.0751847875194745e-06, -5.1705945376060975e-08, 1.6306464635151382e-09,
    -7.86409137723707e-11, 5.168262387349193e-12, -4.3045788699253914e-13, 4.3265957431549404e-14,
    -5.069034095935236e-15, 6.748072215733873e-16, -1.0011513723467786e-16, 1.6305919233744186e-17,
)
Q0 = (
    -0.015555854605337009, 6.838519942611649e-05, -7.414498411060647e-07, 1.7972457247968992e-08, -7.27191593686632e-10,
    4.2201219046687385e-11, -3.206747420996635e-12, 3.006145125351706e-13, -3.336328185322427e-14,
    4.255225040245461e-15, -6.09993013164005e-16, 9.662128970303257e-17, -1.6686065214378146e-17,
    3.1082440486738143e-18, -6.191115787358145e-19, 1.3091448717220122e-19,
)
P1 = (
    1.0009030408600137, 0.0008989898330859408, -3.987284300488908e-06, 6.177633960644299e-08, -1.8718907491063067e-09,
    8.816898659582339e-11, -5.704863640395645e-12, 4.699195515230542e-13, -4.6842237839904895e-14,
    5.452674896044717e-15, -7.221180842274018e-16, 1.0667689114335412e-16, -1.7312313216116335e-17,
)
Q1 = (
    0.04677778706953532, -9.62772354915708e-05, 9.138615257955454e-07, -2.0959781384083424e-08, 8.229193327650554e-10,
    -4.686363688176945e-11, 3.5152187949686082e-12, -3.2643156743279e-13, 3.5967765829165294e-14,
    -4.5612523950772974e-15, 6.508282957783384e-16, -1.0269147531823243e-16, 1.767635548776479e-17,
    -3.2834519872981614e-18, 6.524081149589261e-19,
)
K0 = (
    -0.2676636966169514, 0.3442898999246285, 0.0359799365153615, 0.001264615411446926, 2.286212103119452e-05,
    2.5347910790261494e-07, 1.904516377220209e-09, 1.0349695257633625e-11, 4.2598161427910826e-14,
    1.3744654358807508e-16,
)
K1 = (
    0.7626501136694739, -0.3531559607765449, -0.12261118082265715, -0.006975723859639864, -0.0001730288957513052,
    -2.4334061415659684e-06, -2.213387630734726e-08, -1.4114883926335278e-10, -6.666901694199329e-13,
    -2.427449850519366e-15, -7.023863479386288e-18,
)
K0_LARGE = (
    1.2201515410329777, -0.0314481013119645, 0.0015698838857300533, -0.00012849549581627802, 1.39498137188765e-05,
    -1.8317555227191195e-06, 2.766813639445015e-07, -4.660489897687948e-08, 8.574034017414225e-09,
    -1.6975345093890614e-09, 3.5773972814003283e-10, -7.957489244477396e-11, 1.8559491149549264e-11,
    -4.514597883374519e-12, 1.1403405882073441e-12, -2.9800969231481784e-13, 8.032890775068375e-14,
    -2.2275133267462965e-14, 6.340076476276646e-15, -1.848593377920907e-15, 5.5120559994043335e-16,
    -1.6782311257549006e-16, 5.2103917776435543e-17, -1.6475805939842632e-17,
)
K1_LARGE = (
    1.3603130952422213, 0.10392373657681724, -0.002857816859622779, 0.00019521551847135162, -1.936197974166083e-05,
    2.406484947837217e-06, -3.5019606030878126e-07, 5.7410841254500495e-08, -1.0345762465678097e-08,
    2.0150497551970347e-09, -4.1903547593419254e-10, 9.218315187605315e-11, -2.129967838427791e-11,
    5.139639673482343e-12, -1.2891739609498229e-12, 3.348419666052243e-13, -8.976705182010146e-14,
    2.4771544242195988e-14, -7.0198370892147685e-15, 2.038703166239861e-15, -6.057047270643018e-16,
    1.8380935752430455e-16, -5.689462849193648e-17, 1.7940510478863572e-17,
)
AIRY = (
    0.06078525685079726, 0.18996030881729123, -0.250924387032336, -0.09512014013503055, 0.20236324198370076,
    -0.06418728306305249, -0.026814703186039963, 0.024051904281273857, -0.00413259164974895, -0.0020196817905494225,
    0.0011250768750654559, -0.00011697538709676606, -7.125499253060682e-05, 2.8167833107042442e-05,
    -1.7594742389691562e-06, -1.4587201524168717e-06, 4.388747958436033e-07, -1.4627095866197506e-08,
    -1.9495992841846798e-08, 4.660552774163884e-09, -5.106245117904234e-11, -1.8343326708789198e-10,
    3.5857642041278925e-11, 2.658241327479573e-13, -1.2805447574198059e-12, 2.0885896604502407e-13,
    4.8741837202287105e-15, -6.895080927885035e-15, 9.51965014570017e-16, 3.5978991422145034e-17,
    -2.9502705833721254e-17, 3.483989442459416e-18,
)
AIRY_DECAY = (
    0.9844053049171552, -0.014792784850104199, 0.0007327177465426715, -6.12595423417825e-05, 6.83476697557269e-06,
    -9.237229735403982e-07, 1.436225340438052e-07, -2.489319422322096e-08, 4.709793440054328e-09,
    -9.583863708112733e-10, 2.0745855483677591e-10, -4.737267332192277e-11, 1.1336099808224236e-11,
    -2.827706782319351e-12, 7.320712095125598e-13, -1.9599793911089723e-13, 5.4101162570683925e-14,
    -1.5356466802223836e-14, 4.472340393300025e-15, -1.3338094674756683e-15, 4.066582046456231e-16,
    -1.265583225645289e-16, 4.015126334015871e-17, -1.2969972135960937e-17,
)
AIRY_P = (
    0.9993708890742778, -0.0006216836584374116, 7.181193774368645e-06, -2.316269813501758e-07, 1.3216283888528755e-08,
    -1.0938736172758127e-09, 1.1794620737908535e-10, -1.5518841909929856e-11, 2.386927411492466e-12,
    -4.16552889201035e-13, 8.071678110741467e-14, -1.708757321110567e-14, 3.902945148540815e-15, -9.523976784907064e-16,
    2.4632810885752603e-16, -6.709077463464858e-17, 1.913939683718707e-17,
)
AIRY_Q = (
    -0.012904069793077502, 0.00011417159701561301, -2.47015331514187e-06, 1.1276384836703058e-07,
    -8.114132516809686e-09, 7.96449699929011e-10, -9.810535081564676e-11, 1.438554557834067e-11,
    -2.4232142723810082e-12, 4.572243294578044e-13, -9.485713571010158e-14, 2.1334713360480614e-14,
    -5.145258245310423e-15, 1.3189653961186086e-15, -3.5685214438497966e-16, 1.0130701015142451e-16,
    -3.003133317484731e-17, 9.257863950661513e-18, -2.957519212083966e-18, 9.761492965947109e-19,
    -3.320022740137531e-19, 1.160938053896864e-19,
)
# fmt: on


def _series(table: tuple[float, ...], t: Any) -> Any:
    """The Chebyshev series at `t` in [-1, 1], cut where the dtype no longer sees it (Clenshaw's recurrence)."""
    tiny = float(jnp.finfo(t.dtype).eps) / 64
    count = max(i + 1 for i, c in enumerate(table) if abs(c) > tiny)
    b1 = b2 = jnp.zeros_like(t)
    for c in reversed(table[1:count]):
        b1, b2 = 2 * t * b1 - b2 + c, b1
    return t * b1 - b2 + table[0]


def _wave(x: Any, order: int) -> tuple[Any, Any]:
    """(J, Y) of order 0 or 1 for x > 8, from their common amplitude and phase."""
    near = 8 / x
    t = 2 * near * near - 1
    p = _series((P0, P1)[order], t)
    q = near * _series((Q0, Q1)[order], t)
    sin, cos = jnp.sin(x), jnp.cos(x)
    # The phase x - π/4 (order 0) or x - 3π/4 (order 1), without rounding x - π/4.
    s, c = (sin - cos, sin + cos) if order == 0 else (-sin - cos, sin - cos)
    scale = 1 / jnp.sqrt(math.pi * x)
    return scale * (p * c - q * s), scale * (p * s + q * c)


@pointwise("special_bessel_j0", promote="int_to_float")
def special_bessel_j0(self):
    return _j0(jnp.abs(self))


@pointwise("special_bessel_j1", promote="int_to_float")
def special_bessel_j1(self):
    return jnp.sign(self) * _j1(jnp.abs(self))


def _j0(x: Any) -> Any:
    low = jnp.minimum(x, 8)
    return jnp.where(x <= 8, _series(J0, low * low / 32 - 1), _wave(jnp.maximum(x, 8), 0)[0])


def _j1(x: Any) -> Any:
    low = jnp.minimum(x, 8)
    return jnp.where(x <= 8, low * _series(J1, low * low / 32 - 1), _wave(jnp.maximum(x, 8), 1)[0])


@pointwise("special_bessel_y0", promote="int_to_float")
def special_bessel_y0(self):
    low = jnp.clip(self, 0, 8)
    near = 2 / math.pi * jnp.log(low) * _j0(low) + _series(Y0, low * low / 32 - 1)
    return _positive(self, -jnp.inf, jnp.where(self <= 8, near, _wave(jnp.maximum(self, 8), 0)[1]))


@pointwise("special_bessel_y1", promote="int_to_float")
def special_bessel_y1(self):
    low = jnp.clip(self, 0, 8)
    near = 2 / math.pi * (_j1(low) * jnp.log(low) - 1 / low) + low * _series(Y1, low * low / 32 - 1)
    return _positive(self, -jnp.inf, jnp.where(self <= 8, near, _wave(jnp.maximum(self, 8), 1)[1]))


def _positive(x: Any, at_zero: float, value: Any) -> Any:
    return jnp.where(x > 0, value, jnp.where(x == 0, at_zero, jnp.nan))


@pointwise("i0", "special_modified_bessel_i0", promote="int_to_float")
def i0(self):
    return lax.bessel_i0e(self) * jnp.exp(jnp.abs(self))


@pointwise("special_i0e", promote="int_to_float")
def special_i0e(self):
    return lax.bessel_i0e(self)


@pointwise("special_i1", "special_modified_bessel_i1", promote="int_to_float")
def special_i1(self):
    return lax.bessel_i1e(self) * jnp.exp(jnp.abs(self))


@pointwise("special_i1e", promote="int_to_float")
def special_i1e(self):
    return lax.bessel_i1e(self)


@pointwise("special_modified_bessel_k0", promote="int_to_float")
def special_modified_bessel_k0(self):
    return _k0(self, scaled=False)


@pointwise("special_scaled_modified_bessel_k0", promote="int_to_float")
def special_scaled_modified_bessel_k0(x):
    return _k0(x, scaled=True)


@pointwise("special_modified_bessel_k1", promote="int_to_float")
def special_modified_bessel_k1(self):
    return _k1(self, scaled=False)


@pointwise("special_scaled_modified_bessel_k1", promote="int_to_float")
def special_scaled_modified_bessel_k1(x):
    return _k1(x, scaled=True)


def _k0(x: Any, scaled: bool) -> Any:
    low = jnp.clip(x, 0, 2)
    near = _series(K0, low * low / 2 - 1) - jnp.log(low / 2) * lax.bessel_i0e(low) * jnp.exp(low)
    return _positive(x, jnp.inf, _decay(x, low, near, K0_LARGE, scaled))


def _k1(x: Any, scaled: bool) -> Any:
    low = jnp.clip(x, 0, 2)
    near = _series(K1, low * low / 2 - 1) / low + jnp.log(low / 2) * lax.bessel_i1e(low) * jnp.exp(low)
    return _positive(x, jnp.inf, _decay(x, low, near, K1_LARGE, scaled))


def _decay(x: Any, low: Any, near: Any, table: tuple[float, ...], scaled: bool) -> Any:
    high = jnp.maximum(x, 2)
    far = _series(table, 4 / high - 1) / jnp.sqrt(high)
    return jnp.where(x <= 2, near * jnp.exp(low) if scaled else near, far if scaled else far * jnp.exp(-high))


@pointwise("special_spherical_bessel_j0", promote="int_to_float")
def special_spherical_bessel_j0(x):
    safe = jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 1, jnp.where(jnp.isinf(x), 0, jnp.sin(safe) / safe))


@pointwise("special_airy_ai", promote="int_to_float")
def special_airy_ai(x):
    middle = _series(AIRY, (jnp.clip(x, -4, 2) + 1) / 3)
    high = jnp.maximum(x, 2)
    zeta = 2 / 3 * high * jnp.sqrt(high)
    ratio = (4 / 3 * math.sqrt(2)) / zeta
    decay = _series(AIRY_DECAY, 2 * ratio - 1) * jnp.exp(-zeta) / (2 * math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(high)))
    low = jnp.maximum(-x, 4)
    zeta = 2 / 3 * low * jnp.sqrt(low)
    ratio = (16 / 3) / zeta
    t = 2 * ratio * ratio - 1
    angle = zeta + math.pi / 4
    wave = _series(AIRY_P, t) * jnp.sin(angle) + ratio * _series(AIRY_Q, t) * jnp.cos(angle)
    wave = wave / (math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(low)))
    return jnp.where(x > 2, decay, jnp.where(x < -4, wave, middle))
