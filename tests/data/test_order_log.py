"""data_order.jsonl tells which samples a step read, through ramps, skips and going back."""

from gptlite.data.eras import DataSet, Era
from gptlite.data.order_log import FILE_NAME, OrderRow, note_order, read_order, row_of_step

ERAS = [Era(0, 8, {"a": DataSet("hash", 1000, 1.0)}).to_json()]


def test_a_row_is_added_only_where_the_rules_change(tmp_path):
    note_order(tmp_path, OrderRow(0, 0, 16, ERAS))
    note_order(tmp_path, OrderRow(10, 160, 16, ERAS))  # resumed
    assert len(read_order(tmp_path)) == 1
    note_order(tmp_path, OrderRow(20, 320, 32, ERAS))
    note_order(tmp_path, OrderRow(30, 640, 32, ERAS))
    rows = read_order(tmp_path)
    assert [row.step for row in rows] == [0, 20]
    first = [row_of_step(rows, step).first_sample(step) for step in (1, 20, 21, 25)]  # type: ignore[union-attr]
    assert first == [0, 304, 320, 448]
    note_order(tmp_path, OrderRow(5, 80, 16, ERAS))  # back to an older checkpoint, under the older rules
    assert row_of_step(read_order(tmp_path), 25).first_sample(25) == 384  # type: ignore[union-attr]


def test_ramps_and_skipped_samples_count(tmp_path):
    note_order(tmp_path, OrderRow(0, 0, 4, ERAS, batch_ramp=[2, 2, 8], skipped=[[10, 13]]))
    (row,) = read_order(tmp_path)
    steps = [row.schedule().samples(row.first_sample(step)).tolist() for step in range(1, 7)]
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9, 13, 14], [15, 16, 17, 18]]


def test_a_line_cut_short_is_nothing(tmp_path):
    note_order(tmp_path, OrderRow(0, 0, 16, ERAS))
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"step": 5, "sam')
    assert len(read_order(tmp_path)) == 1
    note_order(tmp_path, OrderRow(5, 80, 32, ERAS))
    assert [row.step for row in read_order(tmp_path)] == [0, 5]


def test_a_damaged_row_does_not_keep_a_run_from_going_on(tmp_path):
    note_order(tmp_path, OrderRow(0, 0, 16, ERAS))
    path = tmp_path / FILE_NAME
    for place in (3, 40):
        content = bytearray(path.read_bytes())
        content[place] ^= 0x80  # no longer UTF-8
        path.write_bytes(content)
        assert f"{path}, line 1 is damaged" in note_order(tmp_path, OrderRow(10, 160, 16, ERAS))
        assert path.read_bytes().startswith(content)
    assert len(path.read_bytes().splitlines()) == 3
