"""python -m alibi.attention: prints which backend `auto` takes for which call, and why."""

from alibi.attention.backends import table

if __name__ == "__main__":
    print(
        "The first row that fits, and whose backend can do the call (masks, dropout, segments, windows), is taken:\n"
    )
    print(table())
