"""Tables of numbers in text, .csv and .txt: read whole, or refused with the line and column that is wrong."""

import csv
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

ENCODING = "utf-8-sig"  # with or without a byte-order mark


class Header(NamedTuple):
    line: int  # its number
    delimiter: str | None  # None: spaces
    names: list[str] | None


def read_header(path: Path) -> Header:
    """Of the first line: names, if none of its values is a number. Between semicolons, tabs, bars, commas or spaces."""
    line, first = next(_lines(path), (0, ""))
    if not first:
        raise ValueError("it is empty")
    delimiter = next((mark for mark in ";\t|," if mark in first), None)
    names = _cells(first, delimiter)
    return Header(line, delimiter, None if any(_number(name) is not None for name in names) else names)


def read_table(path: Path) -> np.ndarray:
    line, delimiter, names = read_header(path)
    how = {"delimiter": delimiter, "skiprows": line if names else 0, "ndmin": 2, "quotechar": '"'}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a file without rows
        try:
            return np.loadtxt(path, encoding=ENCODING, **how)
        except (ValueError, UserWarning):
            raise ValueError(_what_is_wrong(path, delimiter, names)) from None


def write_table(path: Path, rows: np.ndarray, names: list[str] | None) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names] if names else [])
        np.savetxt(file, rows, "%.10g", ",")


def _lines(path):
    """Those that say something, with their numbers."""
    with path.open(encoding=ENCODING) as file:
        for number, line in enumerate(file, 1):
            if line.strip() and not line.startswith("#"):
                yield number, line.rstrip("\n")


def _cells(line, delimiter):
    if delimiter is None:
        return line.split()
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]


def _number(cell):
    try:
        return float(cell)
    except ValueError:
        return None


def _what_is_wrong(path, delimiter, names):
    """The first cell that is no number, or the first line of another length."""
    width = None
    for number, line in _lines(path):
        cells = _cells(line, delimiter)
        if width is None:
            width = len(cells)
            if names:
                continue
        if len(cells) != width:
            return f"line {number} has {len(cells)} values and the first line {width}"
        for column, cell in enumerate(cells):
            if _number(cell) is None:
                where = f"line {number}, column {column + 1}" + (f" ({names[column]})" if names else "")
                if not cell:
                    return f"{where} is empty; drop such rows or fill them in"
                if _number(cell.replace(",", ".")) is not None:
                    return f"{where}: {cell!r} has a decimal comma; write a point"
                return f"{where}: {cell!r} is not a number; leave such a column out, or code it as numbers"
    return "it has no rows of numbers"
