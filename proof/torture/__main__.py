"""`python -m proof.torture` makes a run, `python -m proof.torture.checker` judges one again."""

import typer

from proof.torture.command import torture

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(torture)

if __name__ == "__main__":
    app()
