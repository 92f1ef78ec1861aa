//! How well classes are told apart: accuracy, precision, recall and F1 from counts.

use std::fmt;

/// Counts of what was found and what it should have been, of each class. Those of several ranks add up.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Of each class: found rightly, found, there.
    counts: Vec<[u64; 3]>,
}

/// How well one class is told from the others. A share of nothing is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassScore {
    /// The share of what was taken for this class that is of it.
    pub precision: f64,
    /// The share of what is of this class that was taken for it.
    pub recall: f64,
    /// Their harmonic mean.
    pub f1: f64,
    /// Texts of this class.
    pub texts: u64,
}

impl Scores {
    /// No texts yet, of so many classes.
    pub fn new(classes: usize) -> Self {
        Self { counts: vec![[0; 3]; classes] }
    }

    /// Counts a text that was taken for class `found` and is of class `label`.
    ///
    /// # Panics
    ///
    /// If there is no such class.
    pub fn count(&mut self, found: usize, label: usize) {
        self.counts[label][0] += u64::from(found == label);
        self.counts[found][1] += 1;
        self.counts[label][2] += 1;
    }

    /// The counts as numbers, three of each class, which batches and ranks add: f64 has them exactly.
    pub fn to_numbers(&self) -> Vec<f64> {
        self.counts.as_flattened().iter().map(|count| *count as f64).collect()
    }

    /// The scores that sums of such numbers make.
    pub fn of_numbers(sums: &[f64]) -> Self {
        Self { counts: sums.as_chunks().0.iter().map(|class: &[f64; 3]| class.map(|sum| sum as u64)).collect() }
    }

    /// Texts that were counted.
    pub fn texts(&self) -> u64 {
        self.counts.iter().map(|[_, _, there]| there).sum()
    }

    /// The share of texts whose class was found; 0 of none.
    pub fn accuracy(&self) -> f64 {
        share(self.counts.iter().map(|[right, ..]| right).sum(), self.texts())
    }

    /// The mean of the classes' F1, of those that were there or found at all: scikit-learn's `f1_score` with
    /// `average="macro"`.
    pub fn macro_f1(&self) -> f64 {
        let seen: Vec<f64> = self.counts.iter().filter(|[_, found, there]| found + there > 0).map(f1).collect();
        if seen.is_empty() { 0.0 } else { seen.iter().sum::<f64>() / seen.len() as f64 }
    }

    /// The score of each class.
    pub fn classes(&self) -> impl Iterator<Item = ClassScore> {
        self.counts.iter().map(|counts| {
            let [right, found, there] = *counts;
            ClassScore { precision: share(right, found), recall: share(right, there), f1: f1(counts), texts: there }
        })
    }
}

fn share(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

fn f1([right, found, there]: &[u64; 3]) -> f64 {
    share(2 * right, found + there)
}

/// Accuracy and F1 in a line.
impl fmt::Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "accuracy {:.2} %, macro F1 {:.4}", 100.0 * self.accuracy(), self.macro_f1())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores of pairs of what was found and what is.
    fn of(classes: usize, pairs: &[(usize, usize)]) -> Scores {
        let mut scores = Scores::new(classes);
        pairs.iter().for_each(|(found, label)| scores.count(*found, *label));
        scores
    }

    #[test]
    fn scores_are_those_of_scikit_learn() {
        // accuracy_score and precision_recall_fscore_support of y_true = [0, 0, 0, 1, 1, 2], y_pred = [0, 1, 0, 1, 2, 1].
        let pairs = [(0, 0), (1, 0), (0, 0), (1, 1), (2, 1), (1, 2)];
        let scores = of(4, &pairs);
        assert_eq!((scores.texts(), scores.accuracy()), (6, 0.5));
        let class = |precision, recall, f1, texts| ClassScore { precision, recall, f1, texts };
        let found: Vec<ClassScore> = scores.classes().collect();
        let third = 1.0 / 3.0;
        // Class 3 is never there, and does not count in the mean.
        let wanted = [
            class(1.0, 2.0 / 3.0, 0.8, 3),
            class(third, 0.5, 0.4, 2),
            class(0.0, 0.0, 0.0, 1),
            class(0.0, 0.0, 0.0, 0),
        ];
        assert_eq!(found, wanted);
        assert!((scores.macro_f1() - 0.4).abs() < 1e-12);
        assert_eq!(scores.to_string(), "accuracy 50.00 %, macro F1 0.4000");
        assert_eq!(of(2, &[]).to_string(), "accuracy 0.00 %, macro F1 0.0000");
    }

    #[test]
    fn numbers_of_ranks_add_up_to_those_of_all_texts() {
        let (one, two) = ([(0, 1), (1, 1)], [(2, 0), (2, 2), (0, 1)]);
        let [a, b] = [of(3, &one), of(3, &two)].map(|scores| scores.to_numbers());
        let sums: Vec<f64> = a.iter().zip(b).map(|(a, b)| a + b).collect();
        assert_eq!(Scores::of_numbers(&sums), of(3, &[one.as_slice(), &two].concat()));
    }
}
