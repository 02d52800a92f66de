"""Counting the instructions of loops: a listing in which every count is known."""

from __future__ import annotations

from collections import Counter

from tests.codegen.instructions import innermost_loops

LISTING = """
.text.program:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   IADD3 R2, P0, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64+0x200] ;
        /*0030*/                   IMAD.MOV.U32 R9, RZ, RZ, R3 ;
        /*0040*/              @!P0 FADD R4, R4, R5 ;
        /*0050*/                   IMAD.X R3, RZ, RZ, R3, P0 ;
        /*0060*/                   NOP ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   ISETP.GE.AND P1, PT, R2, R7, PT ;
        /*0090*/              @!P1 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
"""


def test_only_the_innermost_loop_is_counted() -> None:
    assert innermost_loops(LISTING) == (12, [Counter(memory=1, moves=1, floats=1, addresses=1, others=1)])
