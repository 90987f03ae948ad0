"""``python -m onebudget.cli``."""

from onebudget.cli import main

if __name__ == "__main__":
    main()
