"""``python -m onebudget``, and so ``torchrun -m onebudget``."""

from onebudget.cli import main

if __name__ == "__main__":
    main()
