"""Rows rebuilt from the rows of shared tokens: orthogonal matching pursuit.

A target token's row is approximated by a sparse combination of the target's rows of shared tokens. The same
combination of the donor's rows of these tokens becomes its row in the donor. Legend: R target ids, N rows, M atoms, H
hidden, K atoms of one row.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from distill.errors import DataError
from distill.progress import Progress
from distill.surgery.vocabulary.subtokens import MEAN, TEXT, Entries, Subtokens

ATOMS = 64  # shared rows of a combination, at most
BATCH = 256  # rows rebuilt at once


@torch.inference_mode()
def pursue(rows: Tensor, atoms: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Approximate rows [N, H] by at most `count` of the atoms [M, H] each: indices and coefficients [N, K].

    Orthogonal matching pursuit (Pati et al. 1993): take the atom most correlated with the residual, then project on all
    atoms taken. Where the residual is zero, or no atom adds a direction, the remaining coefficients are 0.
    """
    lengths = atoms.norm(dim=1)
    count = min(count, int((lengths > 0).sum()), rows.shape[1])
    directions = atoms / lengths.clamp_min(torch.finfo(atoms.dtype).tiny).unsqueeze(1)
    number, hidden = rows.shape
    chosen = torch.zeros(number, count, dtype=torch.long, device=rows.device)
    taken = torch.zeros(number, count, dtype=torch.bool, device=rows.device)
    basis = rows.new_zeros(number, count, hidden)  # orthonormal, one direction per atom taken
    # Atom j taken is the sum over i of upper[i, j] times direction i of the basis.
    upper = torch.eye(count, dtype=rows.dtype, device=rows.device).repeat(number, 1, 1)
    onto = rows.new_zeros(number, count)
    left = rows.clone()
    enough = rows.norm(dim=1) * (32 * torch.finfo(rows.dtype).eps)
    every = torch.arange(number, device=rows.device)
    for step in range(count):
        similar = (left @ directions.T).abs()
        similar.scatter_(1, chosen[:, :step], -1.0)
        best = similar.argmax(1)
        atom = directions[best]
        new = atom.clone()
        for _ in range(2):  # twice is enough (Giraud et al. 2005)
            along = (basis[:, :step] @ new.unsqueeze(2)).squeeze(2)
            upper[:, :step, step] += along
            new -= (along.unsqueeze(1) @ basis[:, :step]).squeeze(1)
        height = new.norm(dim=1)
        useful = (left.norm(dim=1) > enough) & (height > 1e3 * torch.finfo(rows.dtype).eps)
        new = torch.where(useful.unsqueeze(1), new / height.clamp_min(torch.finfo(rows.dtype).tiny).unsqueeze(1), 0.0)
        upper[every, step, step] = torch.where(useful, height, 1.0)
        basis[:, step], chosen[:, step], taken[:, step] = new, best, useful
        onto[:, step] = (new * left).sum(1)
        left -= onto[:, step].unsqueeze(1) * new
        if not bool(useful.any()):
            break
    coefficients = torch.linalg.solve_triangular(upper, onto.unsqueeze(2), upper=True).squeeze(2)
    coefficients = torch.where(taken, coefficients, 0.0) / lengths[chosen].clamp_min(torch.finfo(rows.dtype).tiny)
    return chosen, torch.where(taken, coefficients, 0.0)


def pursue_rows(
    subtokens: Subtokens, target: Tensor, device: torch.device
) -> tuple[dict[int, Entries], dict[str, Any]]:
    """Donor ids and weights for the target ids made from several subtokens, special tokens among them.

    `target` [at least R, H] is the target's own embedding or head; ids with a zero row there are left out. Also returns
    counts and the mean residual relative to the row. Raises DataError for a matrix with too few rows, or without shared
    tokens.
    """
    shared = subtokens.copies
    if len(target) < len(subtokens.origin):
        raise DataError(
            f"the target's matrix has {len(target)} rows for {len(subtokens.origin)} tokens",
            "give the weights and the tokenizer of one model",
        )
    if not len(shared):
        raise DataError("donor and target share no tokens, which pursuit needs", "use the method `subtokens`")
    atoms = target[torch.from_numpy(shared)].float().to(device)
    donor_ids = torch.from_numpy(subtokens.ids[subtokens.offsets[shared]]).long()
    several = numpy.flatnonzero((subtokens.origin == MEAN) | (subtokens.origin == TEXT))
    several = several[target[torch.from_numpy(several)].any(1).numpy()]
    entries: dict[int, Entries] = {}
    residual = 0.0
    progress = Progress("pursuit: rows", len(several))
    for start in range(0, len(several), BATCH):
        part = several[start : start + BATCH]
        rows = target[torch.from_numpy(part)].float().to(device)
        chosen, weights = pursue(rows, atoms, ATOMS)
        rebuilt = (weights.unsqueeze(1) @ atoms[chosen]).squeeze(1)
        residual += float(((rows - rebuilt).norm(dim=1) / rows.norm(dim=1)).sum())
        ids, values = donor_ids[chosen.cpu()].int().numpy(), weights.cpu().numpy()
        for i, row in enumerate(part):
            used = values[i] != 0
            if used.any():
                entries[int(row)] = (ids[i][used], values[i][used])
        progress.step(len(part))
    mean_residual = residual / len(several) if len(several) else 0.0
    return entries, {"rows": len(entries), "atoms": min(ATOMS, len(shared)), "mean_residual": mean_residual}
