"""The engine as an OpenAI-compatible server, in reading order: `app`, `completing`, `calls`, `fields`, `choices`,
`answers`, `front`, `link`, `admission`. `build_app` makes one; `workbench serve` runs it."""
