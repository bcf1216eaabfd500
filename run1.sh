# run1.sh NAME docs_obj q_weight q_beta retq lr steps every extra
cd /tmp/real
python exp.py $1 "{\"forget\":[$2,{\"objective\":\"tnpo\",\"kinds\":\"question\",\"weight\":$3,\"beta\":$4}],\"retain\":[{\"objective\":\"nll\",\"kinds\":\"completion\",\"weight\":1.0},{\"objective\":\"nll\",\"kinds\":\"question\",\"weight\":$5},{\"objective\":\"kl\",\"weight\":0.5,\"direction\":\"reverse\"}],\"lr\":$6,\"steps\":$7,\"every\":$8,\"start\":0 $9}" > $1.log 2>&1
