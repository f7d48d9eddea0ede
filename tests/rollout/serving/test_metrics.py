from __future__ import annotations

from practicum.rollout.serving.metrics import Meter


def test_figures_add_up() -> None:
    meter, running = Meter(), 2.0
    meter.watch("running", "Requests.", lambda: running)
    for seconds in (0.02, 0.2):
        meter.answered("/v1/completions", 200, seconds)
    meter.tokens(5)
    meter.tokens(0, 7)
    meter.first_token(0.05)
    meter.abandoned()
    told = meter.text().decode()
    running = 3.0
    for line in (
        'practicum_server_requests_total{path="/v1/completions",status="200"} 2.0',
        'practicum_server_request_seconds_bucket{le="0.1",path="/v1/completions"} 1.0',
        "practicum_server_first_token_seconds_count 1.0",
        "practicum_server_prompt_tokens_total 5.0",
        "practicum_server_written_tokens_total 7.0",
        "practicum_server_abandoned_total 1.0",
        "practicum_server_running 2.0",
    ):
        assert line in told
    assert "practicum_server_running 3.0" in meter.text().decode()
    assert "practicum_server_running" not in Meter().text().decode()  # each has its own
