"""The engine as an OpenAI-compatible server, in reading order: `app`, `completing`, `calls`, `fields`, `choices`,
`answers`, `events`, `front`, `link`, `admission`, `forecast`. `build_app` makes one; `workbench serve` runs it. Parts
of your own take the place of its own by `own`."""
