#![allow(clippy::unwrap_used)]
use super::*;
use crate::kernels::simd::InstructionSet;
use crate::precision::Flat;
use crate::precision::dynamic_map::{DynamicMap, SIGNED, UNSIGNED};
use candle_core::DType;
use proptest::prelude::*;
use serde_json::Value;

const ALL: [WeightPacking; 3] =
    [WeightPacking::Int8, WeightPacking::Nf4(Nf4Scales::Bf16), WeightPacking::Nf4(Nf4Scales::DoubleQuantized)];

fn packed(packing: WeightPacking, values: FlatRef<'_>) -> Vec<u8> {
    let mut bytes = vec![0xaa; packing.packed_len(values.len())];
    packing.pack(values, &mut bytes);
    bytes
}

fn unpacked(packing: WeightPacking, bytes: &[u8], len: usize, dtype: DType) -> Flat {
    let mut values = Flat::zeros(dtype, len);
    packing.unpack(bytes, values.as_mut());
    values
}

/// Returns numbers of all magnitudes between 2^-7 and 2, generated as in scripts/record_bitsandbytes.py.
fn generated_values(count: usize) -> Vec<f32> {
    let number = |i: usize| {
        let hash = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(97);
        let hash = (hash ^ hash >> 15).wrapping_mul(2_246_822_519);
        f32::from_bits((hash & 0x8000_0000) | (120 + (hash >> 23 & 7)) << 23 | (hash & 0x7f_ffff))
    };
    (0..count).map(number).collect()
}

fn fixture() -> Value {
    serde_json::from_str(include_str!("../../../tests/fixtures/bitsandbytes.json")).unwrap()
}

fn bytes_of(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap().as_bytes();
    text.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    bytes_of(value).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn hash(bytes: &[u8]) -> String {
    format!("{:016x}", crate::util::fnv1a(bytes))
}

#[test]
fn nf4_has_the_codes_and_values_that_bitsandbytes_recorded() {
    let recorded = &fixture()["nf4"];
    let count = recorded["count"].as_u64().unwrap() as usize;
    let (codes, scales) = (bytes_of(&recorded["codes"]), floats(&recorded["absmax"]));
    let values = generated_values(count);
    let packing = WeightPacking::Nf4(Nf4Scales::Bf16);
    let packed_bytes = packed(packing, FlatRef::F32(&values));
    for (i, record) in packed_bytes.chunks(34).enumerate() {
        let in_block = &codes[i * 32..codes.len().min((i + 1) * 32)];
        assert_eq!(record[2..2 + in_block.len()], *in_block, "the codes of block {i}");
        assert_eq!(record[..2], half::bf16::from_f32(scales[i]).to_le_bytes(), "the scale of block {i}");
    }
    // These recorded scales are bf16 numbers, so they are the same in both libraries.
    let mut bytes = packed_bytes;
    let bf16_scales = floats(&recorded["bf16_absmax"]);
    bytes
        .chunks_mut(34)
        .zip(&bf16_scales)
        .for_each(|(record, s)| record[..2].copy_from_slice(&half::bf16::from_f32(*s).to_le_bytes()));
    for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
        let decoded = unpacked(packing, &bytes, count, dtype);
        assert_eq!(decoded.as_bytes(), bytes_of(&recorded["dequantized"][name]), "{name}");
    }
}

#[test]
fn double_quantized_scales_give_the_values_that_bitsandbytes_recorded() {
    let recorded = &fixture()["nested"];
    let count = recorded["count"].as_u64().unwrap() as usize;
    let packing = WeightPacking::Nf4(Nf4Scales::DoubleQuantized);
    // The scales fill one block and a part of another.
    let (codes, nested) = (bytes_of(&recorded["codes_of_second"]), bytes_of(&recorded["absmax_codes"]));
    let offsets = floats(&recorded["offsets"]);
    let packed_bytes = packed(packing, FlatRef::F32(&generated_values(count)));
    let unit = packing.packed_len(packing.unit());
    assert_eq!(packed_bytes[..4], offsets[0].to_le_bytes(), "the mean of the first scales");
    assert_eq!(packed_bytes[4..8], floats(&recorded["absmax2"])[0].to_le_bytes());
    assert_eq!(packed_bytes[8..8 + 256], nested[..256], "the codes of the first scales");
    assert_eq!(packed_bytes[unit + 8..unit + 8 + nested.len() - 256], nested[256..]);
    assert_eq!(packed_bytes[unit + 8 + nested.len() - 256..], codes, "the codes of the elements");
    for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
        let decoded = unpacked(packing, &packed_bytes, count, dtype);
        assert_eq!(hash(decoded.as_bytes()), recorded["hash_of_dequantized"][name], "{name}");
    }
}

#[test]
fn the_dynamic_maps_code_as_bitsandbytes_recorded() {
    let recorded = &fixture()["dynamic"];
    for (name, map) in [("signed", &*SIGNED), ("unsigned", &*UNSIGNED)] {
        let recorded = &recorded[name];
        let map: &DynamicMap = map;
        let values: Vec<f32> = (0..=255).map(|code| map.value(code)).collect();
        assert_eq!(values, floats(&recorded["map"]), "{name}");
        let count = recorded["count"].as_u64().unwrap() as usize;
        let mut values = generated_values(count);
        // The numbers cover all decades.
        values.iter_mut().enumerate().for_each(|(i, x)| *x *= [1.0, 0.03, 1e-3, 1e-5][i % 4]);
        if name == "unsigned" {
            values.iter_mut().for_each(|x| *x = x.abs());
        }
        let (codes, scales) = (bytes_of(&recorded["codes"]), floats(&recorded["absmax"]));
        let mut all = Vec::new();
        for (i, block) in values.chunks(256).enumerate() {
            let mut actual = vec![0; block.len()];
            let scale = map.quantize(block, &mut actual);
            assert_eq!((scale, &actual[..]), (scales[i], &codes[i * 256..i * 256 + block.len()]), "{name}, block {i}");
            let mut decoded = vec![0.0; block.len()];
            map.dequantize(&actual, scale, &mut decoded);
            all.extend(decoded);
        }
        assert_eq!(hash(FlatRef::F32(&all).as_bytes()), recorded["hash_of_dequantized"], "{name}");
    }
}

#[test]
fn shards_of_whole_units_are_parts_of_the_whole() {
    let values = generated_values(3 * 16384 + 1000);
    for packing in ALL {
        let whole = packed(packing, FlatRef::F32(&values));
        for cut in [packing.unit(), 2 * 16384, 3 * 16384] {
            let parts = [packed(packing, FlatRef::F32(&values[..cut])), packed(packing, FlatRef::F32(&values[cut..]))];
            assert!(parts.concat() == whole, "{packing:?} cut at {cut}");
            let decoded = unpacked(packing, &parts[1], values.len() - cut, DType::F32);
            let all = unpacked(packing, &whole, values.len(), DType::F32);
            assert!(decoded.as_ref().as_bytes() == all.slice(cut..values.len()).as_bytes());
        }
    }
}

#[test]
fn long_buffers_get_the_same_bits_with_any_number_of_threads_and_from_any_dtype() {
    let values = generated_values(2 * CHUNK + 77_777);
    for packing in ALL {
        let results = [1, 3].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let bytes = packed(packing, FlatRef::F32(&values));
                let decoded = unpacked(packing, &bytes, values.len(), DType::BF16);
                (bytes, decoded)
            })
        });
        assert!(results[0] == results[1], "{packing:?}");
        for dtype in [DType::BF16, DType::F16] {
            let narrow = Flat::from_f32(values.clone(), dtype);
            let mut wide = Flat::zeros(DType::F32, 0);
            wide.extend_cast(narrow.as_ref());
            assert!(packed(packing, narrow.as_ref()) == packed(packing, wide.as_ref()), "{packing:?} of {dtype:?}");
        }
    }
}

#[test]
fn an_element_takes_little_more_than_half_a_byte() {
    for (packing, max_bytes) in ALL.into_iter().zip([1.032, 0.532, 0.517]) {
        assert!(packing.packed_len(1 << 20) as f64 <= max_bytes * f64::from(1 << 20), "{packing:?}");
    }
    let [_, bf16, double] = ALL;
    assert_eq!([0, 1, 64, 65].map(|n| bf16.packed_len(n)), [0, 34, 34, 68]);
    assert_eq!([0, 1, 65, 16384, 16385].map(|n| double.packed_len(n)), [0, 41, 74, 8456, 8497]);
}

proptest! {
    #[test]
    fn every_level_packs_and_unpacks_alike(values in prop::collection::vec(-10f32..10.0, 1..500)) {
        for scales in [Nf4Scales::Bf16, Nf4Scales::DoubleQuantized] {
            let results: Vec<_> = InstructionSet::available().map(|level| {
                let mut bytes = vec![0; WeightPacking::Nf4(scales).packed_len(values.len())];
                level.run(nf4::PackNf4 { scales, src: FlatRef::F32(&values), dst: &mut bytes });
                let mut decoded = vec![0f32; values.len()];
                level.run(nf4::UnpackNf4 { scales, src: &bytes, dst: FlatMut::F32(&mut decoded) });
                (bytes, decoded)
            }).collect();
            prop_assert!(results.iter().all(|r| *r == results[0]));
        }
    }

    #[test]
    fn an_element_becomes_the_nearest_level_of_its_block(values in prop::collection::vec(-10f32..10.0, 1..200)) {
        let packing = WeightPacking::Nf4(Nf4Scales::Bf16);
        let decoded = unpacked(packing, &packed(packing, FlatRef::F32(&values)), values.len(), DType::F32);
        for (block, start) in values.chunks(64).zip((0..).step_by(64)) {
            let scale = block.iter().fold(0f32, |m, x| m.max(x.abs()));
            for (i, x) in block.iter().enumerate() {
                let nearest = nf4::LEVELS.iter().fold(f32::MAX, |m, l| m.min((l * scale - x).abs()));
                // A scale in bf16 has a relative error of at most 1/256.
                prop_assert!((decoded.as_ref().get(start + i) - x).abs() <= nearest + scale / 250.0);
            }
        }
    }
}

#[test]
fn zeros_stay_zeros_and_what_is_not_finite_takes_its_block_with_it() {
    for packing in ALL {
        let back = unpacked(packing, &packed(packing, FlatRef::F32(&[0.0; 100])), 100, DType::F32);
        assert!(back == Flat::F32(vec![0.0; 100]), "{packing:?}");
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = generated_values(200);
        values[70] = bad;
        let packing = WeightPacking::Nf4(Nf4Scales::Bf16);
        let back = unpacked(packing, &packed(packing, FlatRef::F32(&values)), 200, DType::F32);
        for i in 0..200 {
            assert!(back.as_ref().get(i).is_finite() != (64..128).contains(&i) || back.as_ref().get(i) == 0.0, "{i}");
        }
        assert!(!back.as_ref().get(70).is_finite());
    }
}
