"""Load on any OpenAI endpoint over HTTP: `workbench load URL`. In reading order:

schedule      who asks for how much, and when: all of it is known before the first request is sent
wire          HTTP/1.1 and server-sent events, read from bytes
client        one request, and how it ended; what the server accepts
timers        an event loop whose timers are not rounded to milliseconds
runner        the requests of a schedule, sent when they are due
recording     what is kept of a run: one JSONL file, from which every number is computed
definitions   TTFT, TPOT, ITL and goodput, as six tools define them
claims        what so many requests can show: intervals and percentiles
report        a run in words and tables
export        a recording in the JSON keys of vLLM's benchmark
search        the highest rate that meets the objectives
command       the command line
"""
